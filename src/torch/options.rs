//! Options as the schemas spell them, in strings and numbers, made into types.
//!
//! A schema has no enums and no nested options, so choices come as strings, dtypes by their names,
//! and everything in one flat list. Ranges of numbers are checked by the core.

use super::CollateOptions;
use super::bridge::ffi;
use crate::batch::{LayoutOptions, MaskDtype};
use crate::{Error, Result};

impl ffi::RowOptions {
    /// As the core wants them.
    pub fn layout(&self) -> LayoutOptions {
        LayoutOptions {
            row_len: self.row_len,
            max_sample_len: self.max_sample_len,
            pad_to_multiple_of: self.pad_to_multiple_of,
            align_samples_to: self.align_samples_to,
            ..LayoutOptions::default()
        }
    }
}

impl ffi::CollateOptions<'_> {
    /// As the core wants them, or what is wrong with them.
    pub fn parse(&self) -> Result<CollateOptions> {
        let dtype = mask_dtype("mask_dtype", self.mask_dtype)?;
        let attention_mask = match (self.attention_mask, dtype) {
            ("none", _) => None,
            ("bool", None | Some(MaskDtype::Bool)) => Some(MaskDtype::Bool),
            ("additive", None) => Some(MaskDtype::Float32),
            ("additive", Some(dtype)) if dtype != MaskDtype::Bool => Some(dtype),
            ("bool" | "additive", Some(_)) => {
                let found = format!(
                    "torch.{} with attention_mask {:?}",
                    self.mask_dtype, self.attention_mask
                );
                return Err(refused(
                    "mask_dtype",
                    found,
                    "torch.bool for \"bool\", a float dtype for \"additive\"",
                ));
            }
            (other, _) => {
                return Err(refused(
                    "attention_mask",
                    format!("{other:?}"),
                    "\"none\", \"bool\" or \"additive\"",
                ));
            }
        };
        let padded_tail = self.padded_tail.parse().map_err(|()| {
            refused(
                "padded_tail",
                format!("{:?}", self.padded_tail),
                "\"own\", \"last\" or \"none\"",
            )
        })?;
        Ok(CollateOptions {
            layout: LayoutOptions {
                padded_tail,
                position_start: self.position_start,
                causal: self.causal,
                ..self.rows.layout()
            },
            pad_token_id: self.pad_token_id,
            mask_first_label: self.mask_first_label,
            attention_mask,
            window: self.has_window.then_some(self.window),
        })
    }
}

fn refused(key: &'static str, found: String, expected: &str) -> Error {
    Error::SettingValue {
        key,
        found,
        expected: expected.into(),
    }
}

/// The dtype of a mask by torch's name for it; none for an empty name.
pub(super) fn mask_dtype(key: &'static str, name: &str) -> Result<Option<MaskDtype>> {
    match name {
        "" => Ok(None),
        "bool" => Ok(Some(MaskDtype::Bool)),
        "float32" => Ok(Some(MaskDtype::Float32)),
        "bfloat16" => Ok(Some(MaskDtype::BFloat16)),
        "float16" => Ok(Some(MaskDtype::Float16)),
        _ => Err(Error::SettingType {
            key,
            found: format!("torch.{name}"),
            expected: "torch.bool, torch.float32, torch.bfloat16 or torch.float16".into(),
        }),
    }
}
