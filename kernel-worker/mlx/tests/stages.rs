//! Every stage and block type on every device of MLX that is there, beside the reference.

use velox_engine::offer::{Offer, Opening};
use velox_kernels::label::BackendLabel;
use velox_kvcache::PageBudget;
use velox_mlx::offers;

#[test]
fn every_probe_comes_out_right() {
    let offers = offers::linked().offers;
    let host = [BackendLabel::Cpu, BackendLabel::Reference];
    let of_mlx: Vec<&dyn Offer> = offers
        .iter()
        .filter(|offer| !host.contains(&offer.label()))
        .collect();
    assert!(!of_mlx.is_empty());
    let mut wrong = Vec::new();
    for offer in of_mlx {
        let opening = Opening {
            stored_types: &["F32"],
            threads: 1,
            budget: PageBudget::new(1 << 24),
        };
        let label = offer.label();
        let probed = offer.probe(&opening, &mut |case, outcome| match outcome {
            Ok(outcome) if outcome.is_right() => {}
            other => wrong.push(format!("{label}: {case:?}: {other:?}")),
        });
        if let Err(error) = probed {
            wrong.push(format!("{label}: {error}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
