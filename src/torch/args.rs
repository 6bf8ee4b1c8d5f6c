//! Tensor arguments, checked at the door: device, dtype and shape, with the argument's name in the
//! sentence.
//!
//! Lengths, offsets, indices and positions are accepted in every integer dtype and read as int64;
//! floats and bools are refused, because a float offset is a mistake somewhere and not a number to
//! round. Token ids and labels are int32 or int64, as data sets store them, and are widened where
//! they are written. What the numbers say is checked by the core.

use tch::{Kind, TchError, Tensor};

use super::bridge::ffi::View;
use super::dtype;
use super::handle::{Dense, look};
use crate::{Error, Result};

const INTEGERS: &str = "an integer dtype such as torch.int64";

/// Torch's numbers of the dtypes that tch has no name for.
const UINT16: i32 = 27;
const UINT32: i32 = 28;
const UINT64: i32 = 29;

/// Token ids or labels in the dtype that they came in.
pub(super) enum Ids<'a> {
    I32(Dense<'a>),
    I64(Dense<'a>),
}

impl Ids<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Ids::I32(ids) | Ids::I64(ids) => ids.len(),
        }
    }
}

/// One-dimensional integers, as int64.
pub(super) fn integers<'a>(name: &str, tensor: &'a Tensor) -> Result<Dense<'a>> {
    to_int64(name, tensor, one_dimension(name, tensor)?)
}

/// Integers of one row or of several, as int64, with the number of rows and their length.
pub(super) fn integer_rows<'a>(
    name: &str,
    tensor: &'a Tensor,
) -> Result<(Dense<'a>, usize, usize)> {
    let view = on_cpu(name, tensor)?;
    let (rows, row_len) = match tensor.size()[..] {
        [row_len] => (1, row_len),
        [rows, row_len] => (rows, row_len),
        _ => return Err(wrong_shape(name, tensor, "(length,) or (rows, length)")),
    };
    Ok((
        to_int64(name, tensor, view)?,
        rows as usize,
        row_len as usize,
    ))
}

/// One-dimensional token ids or labels.
pub(super) fn ids<'a>(name: &str, tensor: &'a Tensor) -> Result<Ids<'a>> {
    let view = one_dimension(name, tensor)?;
    match view.dtype {
        dtype::INT32 => Ok(Ids::I32(Dense::new(tensor, view)?)),
        dtype::INT64 => Ok(Ids::I64(Dense::new(tensor, view)?)),
        _ => Err(wrong_dtype(name, tensor, "torch.int32 or torch.int64")),
    }
}

/// One-dimensional bools.
pub(super) fn bools<'a>(name: &str, tensor: &'a Tensor) -> Result<Dense<'a>> {
    let view = one_dimension(name, tensor)?;
    match view.dtype {
        dtype::BOOL => Dense::new(tensor, view),
        _ => Err(wrong_dtype(name, tensor, "torch.bool")),
    }
}

/// One-dimensional values of any dtype.
pub(super) fn values(name: &str, tensor: &Tensor) -> Result<Dense<'static>> {
    one_dimension(name, tensor)?;
    Dense::of(tensor.f_resolve_conj()?.f_resolve_neg()?)
}

/// A single value of the dtype of `values`.
pub(super) fn single<'a>(name: &str, tensor: &'a Tensor, values: &Dense) -> Result<Dense<'a>> {
    let view = on_cpu(name, tensor)?;
    if tensor.numel() != 1 {
        return Err(wrong_shape(name, tensor, "a single value"));
    }
    if view.dtype != values.dtype() {
        return Err(wrong_dtype(name, tensor, "that of the values"));
    }
    Dense::new(tensor, view)
}

fn to_int64<'a>(name: &str, tensor: &'a Tensor, view: View) -> Result<Dense<'a>> {
    if view.dtype == dtype::INT64 {
        return Dense::new(tensor, view);
    }
    match tensor.f_kind() {
        Ok(Kind::Int | Kind::Int16 | Kind::Int8 | Kind::Uint8)
        | Err(TchError::UnknownKind(UINT16 | UINT32)) => Dense::of(tensor.f_to_kind(Kind::Int64)?),
        Err(TchError::UnknownKind(UINT64)) => {
            // Torch wraps what does not fit, to negative numbers that nobody wrote.
            let wrapped = Dense::of(tensor.f_to_kind(Kind::Int64)?)?;
            let numbers = wrapped.as_slice::<i64>()?;
            match numbers.iter().position(|&number| number < 0) {
                None => Ok(wrapped),
                Some(at) => Err(Error::TensorValue {
                    name: name.into(),
                    at,
                    found: numbers[at] as u64,
                }),
            }
        }
        _ => Err(wrong_dtype(name, tensor, INTEGERS)),
    }
}

fn on_cpu(name: &str, tensor: &Tensor) -> Result<View> {
    let view = look(tensor)?;
    if !view.on_cpu {
        return Err(Error::TensorDevice {
            name: name.into(),
            found: format!("{:?}", tensor.device()).to_lowercase(),
        });
    }
    Ok(view)
}

/// One dimension, on the CPU.
fn one_dimension(name: &str, tensor: &Tensor) -> Result<View> {
    let view = on_cpu(name, tensor)?;
    match view.dimensions {
        1 => Ok(view),
        _ => Err(wrong_shape(name, tensor, "one-dimensional")),
    }
}

fn wrong_shape(name: &str, tensor: &Tensor, expected: &'static str) -> Error {
    Error::TensorShape {
        name: name.into(),
        found: tensor.size(),
        expected,
    }
}

fn wrong_dtype(name: &str, tensor: &Tensor, expected: &'static str) -> Error {
    let found = match tensor.f_kind() {
        Ok(kind) => match kind {
            Kind::Uint8 => "uint8",
            Kind::Int8 => "int8",
            Kind::Int16 => "int16",
            Kind::Int => "int32",
            Kind::Int64 => "int64",
            Kind::Half => "float16",
            Kind::Float => "float32",
            Kind::Double => "float64",
            Kind::BFloat16 => "bfloat16",
            Kind::Bool => "bool",
            Kind::ComplexHalf => "complex32",
            Kind::ComplexFloat => "complex64",
            Kind::ComplexDouble => "complex128",
            _ => return named(name, format!("{kind:?}").to_lowercase(), expected),
        },
        Err(TchError::UnknownKind(UINT16)) => "uint16",
        Err(TchError::UnknownKind(UINT32)) => "uint32",
        Err(TchError::UnknownKind(UINT64)) => "uint64",
        Err(other) => return named(name, format!("({other})"), expected),
    };
    named(name, format!("torch.{found}"), expected)
}

fn named(name: &str, found: String, expected: &'static str) -> Error {
    Error::TensorDtype {
        name: name.into(),
        found,
        expected,
    }
}
