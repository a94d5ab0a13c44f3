//! config.json: an accepted configuration has sizes within limits and usable frequencies.
#![no_main]

use libfuzzer_sys::fuzz_target;
use velox_engine::files::hf_config;

fuzz_target!(|bytes: &[u8]| {
    let Ok(config) = hf_config::parse("config.json", bytes) else {
        return;
    };
    let spec = config.spec;
    assert_eq!(spec.rope.inverse_frequencies.len() * 2, spec.head_dim);
    assert!(spec.n_heads.is_multiple_of(spec.n_kv_heads));
    assert!(
        spec.rope
            .inverse_frequencies
            .iter()
            .all(|frequency| frequency.is_finite() && *frequency > 0.0)
    );
});
