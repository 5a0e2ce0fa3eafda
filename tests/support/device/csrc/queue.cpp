#include "queue.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>

namespace async_cpu {

void (*about_to_block)(bool blocks) = nullptr;

namespace {

using Clock = std::chrono::steady_clock;

struct Tasks {  // what all queues share
  std::mutex mutex;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> queues;
  Pace pace;
  Clock::time_point last_put = Clock::now();
  std::exception_ptr error;
  int threads = 0;
  std::condition_variable ended;  // a thread
  bool stopping = false;
  bool forked = false;
  bool recording = false;
  std::vector<Ran> ran;
};

// Never destroyed: threads may still wait on it when the process ends.
Tasks& tasks() {
  static Tasks& all = *new Tasks();
  return all;
}

void after_fork() {
  // The threads are gone. A child of a process that has used no stream may begin.
  tasks().forked = !tasks().queues.empty();
}

const bool watches_forks = pthread_atfork(nullptr, nullptr, after_fork) == 0;

double now_us() {
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

uint64_t mix(uint64_t value) {  // splitmix64, by Sebastiano Vigna, public domain
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

double unit(uint64_t drawn) { return static_cast<double>(drawn >> 11) * 0x1p-53; }

uint64_t first_random(const Queue& queue) {
  return mix(mix(tasks().pace.seed) ^ mix(static_cast<uint64_t>(queue.stream * kDevices + queue.device)));
}

thread_local bool is_stream = false;

}  // namespace

Queue::Queue(int device, int64_t stream) : device(device), stream(stream) {
  random_ = first_random(*this);
}

uint64_t Queue::draw() { return mix(random_ += 0x9e3779b97f4a7c15); }

Point Queue::put(const char* name, std::function<void()> task) {
  Entry entry;
  entry.name = name;
  entry.task = std::move(task);
  return push(std::move(entry));
}

void Queue::put_wait(Point point) {
  if (point.queue == nullptr || point.queue == this) {
    return;
  }
  Entry entry;
  entry.point = point;
  push(std::move(entry));
}

void Queue::put_stall() {
  Entry entry;
  entry.name = "stall";
  entry.stalls = true;
  push(std::move(entry));
}

Point Queue::push(Entry entry) {
  auto& all = tasks();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.forked) {
    throw std::runtime_error(
        "The asynchronous device was used before this process was forked; fork earlier.");
  }
  if (!started_) {
    started_ = true;
    ++all.threads;
    std::thread([this] { work(); }).detach();
  }
  entries_.push_back(std::move(entry));
  all.last_put = Clock::now();
  changed_.notify_one();
  return {this, ++queued_};
}

Point Queue::end() {
  std::lock_guard<std::mutex> lock(tasks().mutex);
  return {this, queued_};
}

void Queue::want(uint64_t index) {
  if (index > wanted_) {
    wanted_ = index;
    changed_.notify_one();
  }
}

void Queue::hold(std::unique_lock<std::mutex>& lock, bool stalls) {
  auto& all = tasks();
  const Pace& pace = all.pace;
  const uint64_t index = done_ + 1;
  if (phase_left_ == 0) {
    phase_left_ = 1 + draw() % 48;
    lazy_ = unit(draw()) < pace.held;
  }
  --phase_left_;
  const bool sleeps = unit(draw()) < 0.25;
  const double sleep = unit(draw()) * pace.delay_us;
  if (lazy_ || stalls) {
    const auto quiet = std::chrono::duration<double, std::milli>(pace.quiet_ms);
    while (wanted_ < index && !all.stopping && Clock::now() < all.last_put + quiet) {
      changed_.wait_for(lock, quiet);
    }
  } else if (sleeps && sleep > 0) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(sleep));
    lock.lock();
  }
}

void Queue::work() {
  auto& all = tasks();
  is_stream = true;
  std::unique_lock<std::mutex> lock(all.mutex);
  while (true) {
    changed_.wait(lock, [&] { return all.stopping || !entries_.empty(); });
    if (!all.stopping) {
      hold(lock, entries_.front().stalls);
    }
    if (all.stopping) {
      --all.threads;
      all.ended.notify_all();
      return;
    }
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    if (Queue* other = entry.point.queue) {
      other->want(entry.point.index);
      other->progress_.wait(lock, [&] { return all.stopping || other->done_ >= entry.point.index; });
    } else if (entry.task) {
      lock.unlock();
      const double start = now_us();
      std::exception_ptr error;
      try {
        entry.task();
      } catch (...) {
        error = std::current_exception();
      }
      entry.task = nullptr;  // what it holds is freed here, before others go on
      const double end = now_us();
      lock.lock();
      if (error && !all.error) {
        all.error = error;
      }
      if (all.recording) {
        all.ran.push_back({entry.name, device, stream, start, end});
      }
    }
    ++done_;
    progress_.notify_all();
  }
}

Queue& queue_of(int device, int64_t stream) {
  auto& all = tasks();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& queue = all.queues[{device, stream}];
  if (!queue) {
    queue = std::make_unique<Queue>(device, stream);
  }
  return *queue;
}

std::vector<Queue*> queues_of(int device) {
  auto& all = tasks();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Queue*> found;
  for (auto& [key, queue] : all.queues) {
    if (key.first == device) {
      found.push_back(queue.get());
    }
  }
  return found;
}

bool reached(Point point) {
  if (point.queue == nullptr) {
    return true;
  }
  std::lock_guard<std::mutex> lock(tasks().mutex);
  point.queue->want(point.index);
  return point.queue->done_ >= point.index;
}

void await(Point point) {
  auto& all = tasks();
  if (point.queue != nullptr && !reached(point)) {
    if (is_stream) {
      throw std::runtime_error("A task of the asynchronous device must not wait for another.");
    }
    if (about_to_block) {
      about_to_block(true);
    }
    {
      std::unique_lock<std::mutex> lock(all.mutex);
      point.queue->progress_.wait(
          lock, [&] { return all.stopping || point.queue->done_ >= point.index; });
    }
    if (about_to_block) {
      about_to_block(false);
    }
  }
  raise_pending();
}

void await_device(int device) {
  for (Queue* queue : queues_of(device)) {
    await(queue->end());
  }
  raise_pending();
}

void raise_pending() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(tasks().mutex);
    std::swap(error, tasks().error);
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void set_pace(const Pace& pace) {
  auto& all = tasks();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.pace = pace;
  for (auto& [key, queue] : all.queues) {
    queue->random_ = first_random(*queue);
    queue->phase_left_ = 0;
    queue->changed_.notify_one();
  }
}

Pace pace() {
  std::lock_guard<std::mutex> lock(tasks().mutex);
  return tasks().pace;
}

void record_tasks(bool enabled) {
  std::lock_guard<std::mutex> lock(tasks().mutex);
  tasks().recording = enabled;
  if (enabled) {
    tasks().ran.clear();
  }
}

std::vector<Ran> recorded_tasks() {
  std::lock_guard<std::mutex> lock(tasks().mutex);
  return tasks().ran;
}

void stop_queues() {
  auto& all = tasks();
  std::unique_lock<std::mutex> lock(all.mutex);
  all.stopping = true;
  for (auto& [key, queue] : all.queues) {
    queue->changed_.notify_all();
    queue->progress_.notify_all();
  }
  // One may be inside a collective whose peers are gone: it is left behind.
  all.ended.wait_for(lock, std::chrono::seconds(2), [&] { return all.threads == 0; });
}

}  // namespace async_cpu
