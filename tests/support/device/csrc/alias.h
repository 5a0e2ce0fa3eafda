// CPU tensors over device memory, which the tasks of streams compute with.
#pragma once

#include <ATen/core/Tensor.h>

namespace async_cpu {

// A CPU tensor over the memory of a device tensor or CPU tensor. It keeps nothing alive: as on a
// real device, a task may find memory that was freed.
at::Tensor alias_of(const at::Tensor& tensor);

// A tensor without memory with the sizes, strides and dtype of another.
at::Tensor meta_of(const at::Tensor& tensor);

// A new device tensor like another in sizes, strides and dtype.
at::Tensor device_like(const at::Tensor& tensor, int device);

}  // namespace async_cpu
