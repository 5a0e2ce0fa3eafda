// Runs any operator that has a CPU kernel later, on the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace async_cpu {

// The boxed kernel of every operator that has no kernel of its own for the device.
//
// 1. Outputs are allocated at once. Their sizes come from the operator's meta kernel.
// 2. The CPU kernel is queued on the current stream, over the same memory.
// 3. Where the sizes depend on data, or there is no meta kernel, the host waits instead.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace async_cpu
