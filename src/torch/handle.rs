//! Tensors as slices, and tensor handles across the bridge: every `unsafe` block that this crate
//! wrote.
//!
//! A tch `Tensor` is an owned pointer to a C++ `at::Tensor`, which is itself a counted reference.
//! So a tensor crosses the bridge without touching its data: coming in, the C++ reference is looked
//! at through a handle that never frees it; going out, the handle gives its pointer away and
//! forgets it.
//!
//! Data is read and written as slices, because tensors are not `Sync` and the core knows no torch.
//! Inputs are borrowed from a [`Dense`] tensor, outputs are written through a [`Fresh`] one that
//! nobody else has seen yet.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::slice;

use cxx::UniquePtr;
use tch::Tensor;

use super::bridge::ffi;
use super::torch_error;
use crate::{Error, Result};

/// A type whose every bit pattern is a value, so that memory of torch's can be read as it.
pub(super) trait Plain: Copy + Send + Sync {}

impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for [u64; 2] {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for f32 {}

/// What has to be known of `tensor` to read it.
pub(super) fn look(tensor: &Tensor) -> Result<ffi::View> {
    // SAFETY: tch's handle is a pointer to an `at::Tensor`, which lives as long as the handle, and
    // `look` reads it only. Every op test would show the loss of this.
    #[allow(unsafe_code)]
    ffi::look(unsafe { &*tensor.as_ptr().cast() }).map_err(|error| torch_error(error.what()))
}

/// A contiguous and aligned tensor in main memory, whose elements can be read as a slice.
///
/// Torch's rule for every op holds here as well: nobody may write an input while the op runs.
pub(super) struct Dense<'a> {
    view: ffi::View,
    /// Keeps the memory alive, where it is not the argument's.
    _copy: Option<Tensor>,
    argument: PhantomData<&'a Tensor>,
}

impl<'a> Dense<'a> {
    /// `tensor` itself if it can be read as it is, else a copy. The caller has checked that it is
    /// on the CPU.
    pub fn new(tensor: &'a Tensor, view: ffi::View) -> Result<Self> {
        if !view.readable {
            return Dense::of(tensor.f_contiguous()?);
        }
        Ok(Dense {
            view,
            _copy: None,
            argument: PhantomData,
        })
    }

    /// The same of a tensor that was made of an argument.
    pub fn of(mut tensor: Tensor) -> Result<Self> {
        // What is contiguous and still can't be read is unaligned, and has to be copied.
        for copy in [Tensor::f_contiguous, Tensor::f_alias_copy] {
            if !look(&tensor)?.readable {
                tensor = copy(&tensor)?;
            }
        }
        let view = look(&tensor)?;
        if !view.readable {
            return Err(internal("a tensor is not on the CPU"));
        }
        Ok(Dense {
            view,
            _copy: Some(tensor),
            argument: PhantomData,
        })
    }

    /// Torch's number of the dtype.
    pub fn dtype(&self) -> i8 {
        self.view.dtype
    }

    /// The bytes of an element.
    pub fn element_size(&self) -> usize {
        self.view.element_size
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.view.len
    }

    /// The elements, in order.
    pub fn as_slice<T: Plain>(&self) -> Result<&[T]> {
        if size_of::<T>() != self.view.element_size {
            return Err(internal(
                "a tensor is read through elements of another size",
            ));
        }
        if self.view.len == 0 {
            return Ok(&[]); // torch may give a null pointer
        }
        // SAFETY: the view is of a tensor that is contiguous, aligned to its elements or to 8 bytes
        // (no `Plain` type asks for more) and on the CPU; the sizes agree and every bit pattern is a
        // `T`. So `len` values of `T` start at the address, and the argument or the copy
        // keeps them alive. The strided, expanded and unaligned inputs of
        // tests/python/test_ops_collate.py would show the loss of this.
        #[allow(unsafe_code)]
        Ok(unsafe { slice::from_raw_parts(self.view.address as *const T, self.view.len) })
    }
}

/// A new contiguous CPU tensor that nobody else can see yet, so that it may be written.
pub(super) struct Fresh<T> {
    tensor: UniquePtr<ffi::Tensor>,
    view: ffi::View,
    element: PhantomData<T>,
}

impl<T: Plain> Fresh<T> {
    /// Allocates a tensor of the shape `size` and of a dtype with elements of the size of `T`.
    ///
    /// Torch refuses sizes below 0, those whose product overflows, and too much memory.
    pub fn new(size: &[i64], dtype: i8) -> Result<Self> {
        let tensor = ffi::fresh(size, dtype).map_err(|error| torch_error(error.what()))?;
        let view = ffi::look(&tensor).map_err(|error| torch_error(error.what()))?;
        if size_of::<T>() != view.element_size || !view.readable {
            return Err(internal(
                "a new tensor cannot be written, or not through elements of this size",
            ));
        }
        Ok(Fresh {
            tensor,
            view,
            element: PhantomData,
        })
    }

    /// The elements, to be written all of them: until then they are whatever was in the memory.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        if self.view.len == 0 {
            return &mut [];
        }
        // SAFETY: `new` allocated `len` contiguous elements of the size of `T` on the CPU, which it
        // found readable and so aligned, and no other handle exists before `into_tensor`. The memory
        // comes from C++, of which the compiler knows nothing: it holds some bytes, and all bytes are
        // values of `T`. The aliasing tests of tests/python/test_ops_collate.py would show the loss
        // of this.
        #[allow(unsafe_code)]
        unsafe {
            slice::from_raw_parts_mut(self.view.address as *mut T, self.view.len)
        }
    }

    /// Hands the tensor out.
    pub fn into_tensor(self) -> Tensor {
        // SAFETY: the pointer owns an `at::Tensor` that was made with `new`, and tch's handle is the
        // owner from here on. The leak test in tests/python/test_ops_collate.py would show the loss.
        #[allow(unsafe_code)]
        unsafe {
            Tensor::from_ptr(self.tensor.into_raw().cast())
        }
    }
}

/// A new tensor of one dimension that holds `values`.
pub(super) fn vector<T: Plain>(values: &[T], dtype: i8) -> Result<Tensor> {
    let mut fresh = Fresh::new(&[values.len() as i64], dtype)?;
    fresh.as_mut_slice().copy_from_slice(values);
    Ok(fresh.into_tensor())
}

/// A tensor that C++ owns, looked at through tch.
pub(super) struct Borrowed<'a> {
    tensor: ManuallyDrop<Tensor>,
    owner: PhantomData<&'a ffi::Tensor>,
}

impl<'a> Borrowed<'a> {
    /// Looks at `tensor`.
    pub fn new(tensor: &'a ffi::Tensor) -> Self {
        let pointer = std::ptr::from_ref(tensor).cast_mut();
        // SAFETY: tch's handle is a pointer to an `at::Tensor`, which this is and stays for `'a`;
        // tch reads through it only, and `ManuallyDrop` keeps it from freeing what C++ owns. A
        // use-after-free in any op test would show it.
        #[allow(unsafe_code)]
        let tensor = ManuallyDrop::new(unsafe { Tensor::from_ptr(pointer.cast()) });
        Borrowed {
            tensor,
            owner: PhantomData,
        }
    }
}

impl Deref for Borrowed<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Gives a tensor to C++.
pub(super) fn give(tensor: Tensor) -> UniquePtr<ffi::Tensor> {
    let pointer = ManuallyDrop::new(tensor).as_mut_ptr();
    // SAFETY: the handle's pointer came from `new at::Tensor`, is owned by it alone, and is not
    // freed here because of `ManuallyDrop`, so that `std::unique_ptr` may delete it. The leak test
    // in tests/python/test_ops_collate.py watches both.
    #[allow(unsafe_code)]
    unsafe {
        UniquePtr::from_raw(pointer.cast())
    }
}

fn internal(message: &str) -> Error {
    Error::Internal {
        message: message.into(),
    }
}
