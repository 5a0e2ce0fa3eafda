// The streams of the asynchronous device: threads that run queued tasks late.
//
// Each stream is a `Queue`. Host code puts tasks into it and goes on. Only `await` blocks the host.
// When a task runs is drawn from a seed, see `Pace`.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace async_cpu {

constexpr int kDevices = 2;

class Queue;

// A position in a queue. It is reached when every task before it has run.
struct Point {
  Queue* queue = nullptr;
  uint64_t index = 0;
};

// How tasks are delayed.
struct Pace {
  uint64_t seed = 0;
  double delay_us = 0;  // the longest sleep before one task
  double held = 0;      // the part of the time in which a stream runs nothing until asked to
  double quiet_ms = 30; // held tasks run after the host has queued nothing for this long
};

// One task that has run, for a trace.
struct Ran {
  const char* name;
  int device;
  int64_t stream;
  double start_us;
  double end_us;
};

class Queue {
 public:
  Queue(int device, int64_t stream);

  // Queues a task and returns the position behind it. `name` must live for ever.
  Point put(const char* name, std::function<void()> task);
  // Lets the tasks that are queued from now on run after `point`.
  void put_wait(Point point);
  // Queues a task that keeps this stream busy until another stream or the host waits for it.
  void put_stall();
  // The position behind the last queued task.
  Point end();

  const int device;
  const int64_t stream;

 private:
  friend bool reached(Point point);
  friend void await(Point point);
  friend void set_pace(const Pace& pace);
  friend void stop_queues();

  struct Entry {
    const char* name = nullptr;
    std::function<void()> task;
    Point point;
    bool stalls = false;
  };

  Point push(Entry entry);
  void work();
  // Keeps a task back as the pace says; holds the lock again when it returns.
  void hold(std::unique_lock<std::mutex>& lock, bool stalls);
  void want(uint64_t index);
  uint64_t draw();

  std::deque<Entry> entries_;
  uint64_t queued_ = 0;
  uint64_t done_ = 0;
  uint64_t wanted_ = 0;
  uint64_t random_ = 0;
  uint64_t phase_left_ = 0;  // tasks until the next draw of `lazy_`
  bool lazy_ = false;
  bool started_ = false;
  std::condition_variable changed_;   // something to do, or a permission
  std::condition_variable progress_;  // a task is done
};

// The queue of a stream; made at its first use, and never destroyed.
Queue& queue_of(int device, int64_t stream);
// All queues of a device that were used.
std::vector<Queue*> queues_of(int device);

// Whether all before a position has run; if not, it will run soon.
bool reached(Point point);
// Blocks the host until a position is reached, and raises the error of a task that failed.
void await(Point point);
// Blocks the host until all that was queued on a device has run.
void await_device(int device);
// Raises the first error of a task since the last call, if there is one.
void raise_pending();

// Changes the delays, and draws anew from the seed.
void set_pace(const Pace& pace);
Pace pace();

// Forgets what is recorded and begins to record the tasks that run, or stops.
void record_tasks(bool enabled);
std::vector<Ran> recorded_tasks();

// Ends the threads without running what is left. For the end of the process.
void stop_queues();

// Called by `await` with true before the host blocks, and with false after it.
extern void (*about_to_block)(bool blocks);

}  // namespace async_cpu
