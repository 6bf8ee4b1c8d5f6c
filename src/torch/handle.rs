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
use tch::{Device, Kind, Tensor};

use super::bridge::ffi;
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

/// A contiguous and aligned tensor in main memory, whose elements can be read as a slice.
///
/// Torch's rule for every op holds here as well: nobody may write an input while the op runs.
pub(super) struct Dense {
    tensor: Tensor,
    len: usize,
    element_size: usize,
}

impl Dense {
    /// `tensor` itself if it can be read as it is, else a copy. The caller has checked that it is
    /// on the CPU.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        let element_size = tensor.f_kind()?.elt_size_in_bytes();
        if tensor.device() != Device::Cpu {
            return Err(internal("a tensor is not on the CPU"));
        }
        let mut tensor = tensor.f_contiguous()?;
        // Memory from elsewhere, such as torch.frombuffer with an odd offset, may be unaligned.
        if !(tensor.data_ptr() as usize).is_multiple_of(element_size) {
            tensor = tensor.f_alias_copy()?;
        }
        Ok(Dense {
            len: tensor.numel(),
            tensor,
            element_size,
        })
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The elements, in order.
    pub fn as_slice<T: Plain>(&self) -> Result<&[T]> {
        if size_of::<T>() != self.element_size {
            return Err(internal(
                "a tensor is read through elements of another size",
            ));
        }
        if self.len == 0 {
            return Ok(&[]); // torch may give a null pointer
        }
        // SAFETY: `new` made the tensor contiguous, aligned to its elements (no `Plain` type asks
        // for more than its size) and known to be on the CPU; the sizes agree and every bit pattern
        // is a `T`. So `len` values of `T` start at the data pointer, and the handle in `self`
        // keeps them alive. The strided, expanded and unaligned inputs of
        // tests/python/test_ops_collate.py would show the loss of this.
        #[allow(unsafe_code)]
        Ok(unsafe { slice::from_raw_parts(self.tensor.data_ptr().cast(), self.len) })
    }
}

/// A new contiguous CPU tensor that nobody else can see yet, so that it may be written.
pub(super) struct Fresh<T> {
    tensor: Tensor,
    /// Known from the shape: torch's answer takes a call or two, and a batch has eight tensors.
    len: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Fresh<T> {
    /// Allocates a tensor of the shape `size` and of a dtype with elements of the size of `T`.
    pub fn new(size: &[i64], kind: Kind) -> Result<Self> {
        if size_of::<T>() != kind.elt_size_in_bytes() {
            return Err(internal(
                "a tensor is written through elements of another size",
            ));
        }
        // Torch refuses sizes below 0 and those whose product overflows.
        let tensor = Tensor::f_empty(size, (kind, Device::Cpu))?;
        let len = size.iter().product::<i64>() as usize;
        ask_for_huge_pages(&tensor, len * size_of::<T>());
        Ok(Fresh {
            tensor,
            len,
            element: PhantomData,
        })
    }

    /// The elements, to be written all of them: until then they are whatever was in the memory.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: `new` allocated `len` contiguous elements of the size of `T` on the CPU, torch
        // aligns its memory to 64 bytes, and no other handle exists before `into_tensor`. The
        // memory comes from torch's allocator, of which the compiler knows nothing: it holds some
        // bytes, and all bytes are values of `T`. The aliasing tests of
        // tests/python/test_ops_collate.py would show the loss of this.
        #[allow(unsafe_code)]
        unsafe {
            slice::from_raw_parts_mut(self.tensor.data_ptr().cast(), self.len)
        }
    }

    /// Hands the tensor out.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

/// From so many bytes on a tensor's memory comes from the kernel anew each time, and goes back as
/// soon as the tensor does: the most that glibc's malloc keeps for itself.
const ALWAYS_MAPPED: usize = 32 << 20;

/// The size of a huge page on x86-64, and on aarch64 with pages of 4 KiB. Where it is another, the
/// advice covers less or nothing, and that is all.
const HUGE_PAGE: usize = 2 << 20;

/// Asks Linux to map the memory of a large new tensor in huge pages.
///
/// The first write to each page goes through the kernel, and for pages of 4 KiB that takes longer
/// than all the rest: on one virtual machine 27 ms for a mask of 64 MiB, which takes 5 ms to fill a
/// second time. In huge pages there are 32 such writes in place of 16384, and it is 11 ms. Most
/// systems give them only to those who ask. Memory that the allocator keeps is left alone, because
/// the advice would stay with it.
fn ask_for_huge_pages(tensor: &Tensor, bytes: usize) {
    if bytes < ALWAYS_MAPPED {
        return;
    }
    let start = tensor.data_ptr() as usize;
    let first = start.next_multiple_of(HUGE_PAGE);
    let end = (start + bytes) / HUGE_PAGE * HUGE_PAGE;
    #[cfg(target_os = "linux")]
    // SAFETY: `first..end` is whole pages inside the memory of a tensor that is alive, and the
    // advice changes no contents. It may be refused, which is fine. The mask of 36 MB in
    // tests/python/test_ops_mask.py would show the loss of this.
    #[allow(unsafe_code)]
    unsafe {
        libc::madvise(first as *mut _, end - first, libc::MADV_HUGEPAGE);
    }
}

/// A new tensor of one dimension that holds `values`.
pub(super) fn vector<T: Plain>(values: &[T], kind: Kind) -> Result<Tensor> {
    let mut fresh = Fresh::new(&[values.len() as i64], kind)?;
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
