// Current devices and streams of the calling thread, and what torch asks of an accelerator.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include "queue.h"

namespace async_cpu {

int current_device();
void set_current_device(int device);

// The current stream's queue of the calling thread.
Queue& current_queue(int device);
Queue& queue_of(c10::Stream stream);
c10::Stream stream_of(const Queue& queue);
// A stream from the pool of one priority. The pool's streams are given out in turn.
c10::Stream new_stream(int device, bool high_priority);

const at::Generator& default_generator(int device);

// What a read by the host does beside waiting: nothing, a warning, or an error.
enum class SyncDebug { kDefault, kWarn, kError };
void set_sync_debug(SyncDebug mode);
SyncDebug sync_debug();
// Waits for the current stream, as an operator does whose result the host needs, or for another.
void await_for_host(int device);
void await_for_host(Queue& queue);

}  // namespace async_cpu
