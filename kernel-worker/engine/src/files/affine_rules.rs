//! Which matrices of a checkpoint are quantised in MLX's affine form, and how: `quantization` of config.json.
//!
//! ```text
//! {"group_size": 64, "bits": 4, "mode": "affine", "lm_head": {"group_size": 32, "bits": 8}, "model.layers.0.mlp.up_proj": false}
//! ```
//!
//! The object names the layout of every module that has `scales`; further fields are modules with a layout of their
//! own or none.

use std::collections::BTreeMap;

use serde_json::{Map, Value};
use velox_kernels::affine::AffineLayout;

use super::blame::{Blame, excerpt};
use super::json_fields::Fields;
use crate::error::EngineError;

/// The older name first: where both are given they are the same.
const FIELDS: [&str; 2] = ["quantization", "quantization_config"];
const MODE: &str = "mode";
const BITS: &str = "bits";
const GROUP: &str = "group_size";
/// The only module outside the model proper; all others have a dot in their name.
const HEAD: &str = "lm_head";
/// What MLX takes where the object of a module does not say.
const DEFAULT_BITS: usize = 4;
const DEFAULT_GROUP: usize = 64;

/// What config.json says of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AffineRule {
    /// Of this layout if the module has scales, else not quantised.
    IfScaled(AffineLayout),
    /// Of this layout.
    Always(AffineLayout),
    /// Not quantised.
    Never,
}

/// The rules of a checkpoint.
#[derive(Debug)]
pub(super) struct AffineRules {
    /// Of modules that are not named.
    default: AffineLayout,
    modules: BTreeMap<String, AffineRule>,
}

impl AffineRules {
    /// Reads the rules; `None` if nothing is quantised.
    ///
    /// # Errors
    /// [`EngineError::UnsupportedModel`] for another method than MLX's affine one.
    pub(super) fn read(config: &Fields<'_>, blame: &Blame) -> Result<Option<Self>, EngineError> {
        let mut found = None;
        for name in FIELDS {
            let Some(object) = config.object(name)? else {
                continue;
            };
            if let Some(method) = object.get("quant_method").and_then(Value::as_str) {
                return Err(blame.unsupported(format!(
                    "{name} with quant_method {} (only MLX's affine quantisation is; use a GGUF file)",
                    excerpt(method)
                )));
            }
            match found {
                None => found = Some((name, object)),
                Some((_, first)) if first == object => {}
                Some((first, _)) => {
                    return Err(blame.unsupported(format!("{name} beside a different {first}")));
                }
            }
        }
        found
            .map(|(name, object)| Self::of(name, object, blame))
            .transpose()
    }

    fn of(name: &str, object: &Map<String, Value>, blame: &Blame) -> Result<Self, EngineError> {
        let path = format!("{name}.");
        let fields = Fields::new(object, &path, blame);
        check_mode(&fields)?;
        let (bits, group) = (fields.required_size(BITS)?, fields.required_size(GROUP)?);
        let default = layout(bits, group, &path, blame)?;
        let mut modules = BTreeMap::new();
        for (module, value) in object {
            if [MODE, BITS, GROUP].contains(&module.as_str()) {
                continue;
            }
            let is_module = module == HEAD || module.contains('.');
            let rule = match value {
                Value::Bool(true) if is_module => AffineRule::Always(default),
                Value::Bool(false) if is_module => AffineRule::Never,
                Value::Object(own) if is_module => {
                    let path = format!("{path}{}.", excerpt(module));
                    AffineRule::Always(layout_of(own, &path, blame)?)
                }
                _ => return Err(fields.unsupported(module)),
            };
            modules.insert(module.clone(), rule);
        }
        Ok(Self { default, modules })
    }

    /// Returns what is said of a module.
    pub(super) fn rule(&self, module: &str) -> AffineRule {
        self.modules
            .get(module)
            .copied()
            .unwrap_or(AffineRule::IfScaled(self.default))
    }
}

/// Reads the object of a module.
fn layout_of(
    object: &Map<String, Value>,
    path: &str,
    blame: &Blame,
) -> Result<AffineLayout, EngineError> {
    let fields = Fields::new(object, path, blame);
    check_mode(&fields)?;
    let known = [MODE, BITS, GROUP];
    if let Some(other) = object.keys().find(|name| !known.contains(&name.as_str())) {
        return Err(fields.unsupported(other));
    }
    let bits = fields.size(BITS)?.unwrap_or(DEFAULT_BITS);
    let group = fields.size(GROUP)?.unwrap_or(DEFAULT_GROUP);
    layout(bits, group, path, blame)
}

fn check_mode(fields: &Fields<'_>) -> Result<(), EngineError> {
    match fields.text(MODE)? {
        None | Some("affine") => Ok(()),
        Some(_) => Err(fields.unsupported(MODE)),
    }
}

fn layout(
    bits: usize,
    group: usize,
    path: &str,
    blame: &Blame,
) -> Result<AffineLayout, EngineError> {
    AffineLayout::new(bits, group).ok_or_else(|| {
        blame.unsupported(format!(
            "{path}{BITS} {bits} with {GROUP} {group} (2, 3, 4, 5, 6 and 8 with 32, 64 and 128 are)"
        ))
    })
}
