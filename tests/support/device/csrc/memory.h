// Device memory and pinned host memory. Both are ordinary memory of the process.
//
// A freed device block goes to the next allocation of its size on the same stream at once. It is
// filled with 0xFF (NaN in each floating dtype) when its stream passes that allocation. So what
// another stream reads or writes without an event is lost, as with CUDA's caching allocator. A free
// writes nothing, as there: gradients may be freed before the stream that reads them has done so,
// if the next owner waits for it. Torch's fully_shard relies on that.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "queue.h"

namespace async_cpu {

c10::DeviceAllocator& device_memory();
at::HostAllocator& pinned_memory();

// Whether an address is in pinned memory.
bool is_pinned(const void* pointer);
// The device whose memory an address is in, or -1.
int device_of(const void* pointer);
// Keeps a pinned block, once it is freed, from reuse until a position is reached.
void record_pinned_use(const void* pointer, Point point);

}  // namespace async_cpu
