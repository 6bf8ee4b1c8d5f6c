//! Tensor arguments, checked at the door: device, dtype and shape, with the argument's name in the
//! sentence.
//!
//! Lengths, offsets, indices and positions are accepted in every integer dtype and read as int64;
//! floats and bools are refused, because a float offset is a mistake somewhere and not a number to
//! round. Token ids and labels are int32 or int64, as data sets store them, and are widened where
//! they are written. What the numbers say is checked by the core.

use tch::{Device, Kind, TchError, Tensor};

use super::handle::Dense;
use crate::{Error, Result};

const INTEGERS: &str = "an integer dtype such as torch.int64";

/// Torch's numbers of the dtypes that tch has no name for.
const UINT16: i32 = 27;
const UINT32: i32 = 28;
const UINT64: i32 = 29;

/// Token ids or labels in the dtype that they came in.
pub(super) enum Ids {
    I32(Dense),
    I64(Dense),
}

impl Ids {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Ids::I32(ids) | Ids::I64(ids) => ids.len(),
        }
    }
}

/// One-dimensional integers, as int64.
pub(super) fn integers(name: &str, tensor: &Tensor) -> Result<Dense> {
    on_cpu(name, tensor)?;
    one_dimension(name, tensor)?;
    to_int64(name, tensor)
}

/// Integers of one row or of several, as int64, with the number of rows and their length.
pub(super) fn integer_rows(name: &str, tensor: &Tensor) -> Result<(Dense, usize, usize)> {
    on_cpu(name, tensor)?;
    let (rows, row_len) = match tensor.size()[..] {
        [row_len] => (1, row_len),
        [rows, row_len] => (rows, row_len),
        _ => return Err(wrong_shape(name, tensor, "(length,) or (rows, length)")),
    };
    Ok((to_int64(name, tensor)?, rows as usize, row_len as usize))
}

/// One-dimensional token ids or labels.
pub(super) fn ids(name: &str, tensor: &Tensor) -> Result<Ids> {
    on_cpu(name, tensor)?;
    one_dimension(name, tensor)?;
    match tensor.f_kind() {
        Ok(Kind::Int) => Ok(Ids::I32(Dense::new(tensor)?)),
        Ok(Kind::Int64) => Ok(Ids::I64(Dense::new(tensor)?)),
        kind => Err(wrong_dtype(name, kind, "torch.int32 or torch.int64")),
    }
}

/// One-dimensional bools.
pub(super) fn bools(name: &str, tensor: &Tensor) -> Result<Dense> {
    on_cpu(name, tensor)?;
    one_dimension(name, tensor)?;
    match tensor.f_kind() {
        Ok(Kind::Bool) => Dense::new(tensor),
        kind => Err(wrong_dtype(name, kind, "torch.bool")),
    }
}

/// One-dimensional values of any dtype that tch knows.
pub(super) fn values(name: &str, tensor: &Tensor) -> Result<(Dense, Kind)> {
    on_cpu(name, tensor)?;
    one_dimension(name, tensor)?;
    Ok((
        Dense::new(&tensor.f_resolve_conj()?.f_resolve_neg()?)?,
        tensor.f_kind()?,
    ))
}

/// A single value of the dtype `kind`.
pub(super) fn single(name: &str, tensor: &Tensor, kind: Kind) -> Result<Dense> {
    on_cpu(name, tensor)?;
    if tensor.numel() != 1 {
        return Err(wrong_shape(name, tensor, "a single value"));
    }
    match tensor.f_kind() {
        Ok(found) if found == kind => Dense::new(tensor),
        found => Err(wrong_dtype(name, found, "that of the values")),
    }
}

fn to_int64(name: &str, tensor: &Tensor) -> Result<Dense> {
    match tensor.f_kind() {
        Ok(Kind::Int64) => Dense::new(tensor),
        Ok(Kind::Int | Kind::Int16 | Kind::Int8 | Kind::Uint8)
        | Err(TchError::UnknownKind(UINT16 | UINT32)) => {
            Dense::new(&tensor.f_to_kind(Kind::Int64)?)
        }
        Err(TchError::UnknownKind(UINT64)) => {
            // Torch wraps what does not fit, to negative numbers that nobody wrote.
            let wrapped = Dense::new(&tensor.f_to_kind(Kind::Int64)?)?;
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
        kind => Err(wrong_dtype(name, kind, INTEGERS)),
    }
}

fn on_cpu(name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.device() {
        Device::Cpu => Ok(()),
        device => Err(Error::TensorDevice {
            name: name.into(),
            found: format!("{device:?}").to_lowercase(),
        }),
    }
}

fn one_dimension(name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.dim() {
        1 => Ok(()),
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

fn wrong_dtype(name: &str, found: Result<Kind, TchError>, expected: &'static str) -> Error {
    let found = match found {
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
