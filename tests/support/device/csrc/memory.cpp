#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

#include "streams.h"

namespace async_cpu {

namespace {

constexpr size_t kRound = 512;  // as CUDA's allocator
constexpr int kPoison = 0xFF;
constexpr size_t kTotal = size_t{1} << 34;  // what a device says that it has

void* new_memory(size_t size) {
  void* memory = std::aligned_alloc(kRound, size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

size_t rounded(size_t size) { return (size + kRound - 1) / kRound * kRound; }

struct Block {
  char* data = nullptr;
  size_t size = 0;
  size_t requested = 0;
  int device = -1;  // of host memory
  Queue* owner = nullptr;
  std::vector<Point> uses;  // what has to run before it is used again, beside the owner's tasks
};

// The blocks of device memory or pinned memory, by address.
struct Blocks {
  std::mutex mutex;
  std::map<const char*, Block*> all;

  Block* find(const void* pointer) {
    const char* address = static_cast<const char*>(pointer);
    auto after = all.upper_bound(address);
    if (after == all.begin()) {
      return nullptr;
    }
    Block* block = std::prev(after)->second;
    return address < block->data + block->size ? block : nullptr;
  }
};

bool all_reached(const std::vector<Point>& points) {
  for (const Point& point : points) {
    if (!reached(point)) {
      return false;
    }
  }
  return true;
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const auto device = current_device();
    const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (n == 0) {
      return {nullptr, nullptr, &release, where};
    }
    Queue& queue = current_queue(device);
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    settle();
    const size_t size = rounded(n);
    Block* block = nullptr;
    auto& free = free_[{&queue, size}];
    if (!free.empty()) {
      block = free.back();
      free.pop_back();
      char* data = block->data;
      queue.put("allocate", [=] { std::memset(data, kPoison, size); });
    } else {
      block = new Block{static_cast<char*>(new_memory(size)), size, n, device, &queue, {}};
      std::memset(block->data, kPoison, size);
      blocks_.all[block->data] = block;
      count(device).reserved_bytes[0].increase(size);
      count(device).segment[0].increase(1);
      count(device).num_device_alloc += 1;
    }
    block->requested = n;
    auto& counts = count(device);
    counts.allocation[0].increase(1);
    counts.allocated_bytes[0].increase(size);
    counts.active[0].increase(1);
    counts.active_bytes[0].increase(size);
    counts.requested_bytes[0].increase(n);
    return {block->data, block, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, std::size_t size) const override {
    current_queue(current_device()).put("copy_data", [=] { std::memcpy(target, source, size); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    std::vector<Block*> unused;
    {
      std::lock_guard<std::mutex> lock(blocks_.mutex);
      settle();
      for (auto& [key, free] : free_) {
        unused.insert(unused.end(), free.begin(), free.end());
      }
      free_.clear();
    }
    for (int device = 0; device < kDevices; ++device) {
      await_device(device);  // a stream that did not wait may still use what is freed
    }
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    for (Block* block : unused) {
      count(block->device).reserved_bytes[0].decrease(block->size);
      count(block->device).segment[0].decrease(1);
      count(block->device).num_device_free += 1;
      blocks_.all.erase(block->data);
      std::free(block->data);
      delete block;
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (auto* block = static_cast<Block*>(pointer.get_context())) {
      std::lock_guard<std::mutex> lock(blocks_.mutex);
      recorded_[block].push_back(&queue_of(stream.device_index(), stream.id()));
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    return count(device);
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    for (auto* each : counters(device)) {
      (*each)[0].reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    for (auto* each : counters(device)) {
      (*each)[0].reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    const auto reserved = static_cast<size_t>(count(device).reserved_bytes[0].current);
    return {kTotal - std::min(kTotal, reserved), kTotal};
  }

  int device_of(const void* pointer) {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    Block* block = blocks_.find(pointer);
    return block ? block->device : -1;
  }

 private:
  static void release(void* context);

  void free(Block* block) {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    auto& counts = count(block->device);
    counts.allocation[0].decrease(1);
    counts.allocated_bytes[0].decrease(block->size);
    counts.requested_bytes[0].decrease(block->requested);
    for (Queue* queue : recorded_[block]) {
      if (queue != block->owner) {
        block->uses.push_back(queue->end());
      }
    }
    recorded_.erase(block);
    waiting_.push_back(block);
    settle();
  }

  // Moves freed blocks that no stream uses any more to where allocations find them.
  void settle() {
    std::vector<Block*> left;
    for (Block* block : waiting_) {
      if (!all_reached(block->uses)) {
        left.push_back(block);
        continue;
      }
      block->uses.clear();
      const size_t size = block->size;
      count(block->device).active[0].decrease(1);
      count(block->device).active_bytes[0].decrease(size);
      free_[{block->owner, size}].push_back(block);
    }
    waiting_.swap(left);
  }

  c10::CachingDeviceAllocator::DeviceStats& count(int device) { return counts_.at(device); }

  std::vector<c10::CachingAllocator::StatArray*> counters(int device) {
    auto& all = count(device);
    return {&all.allocation,   &all.segment,        &all.active,         &all.allocated_bytes,
            &all.active_bytes, &all.reserved_bytes, &all.requested_bytes};
  }

  Blocks blocks_;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> waiting_;
  std::unordered_map<Block*, std::vector<Queue*>> recorded_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> counts_;
};

DeviceMemory& the_device_memory() {
  static auto& memory = *new DeviceMemory();  // freed memory may come back at any time
  return memory;
}

void DeviceMemory::release(void* context) {
  if (context != nullptr) {
    the_device_memory().free(static_cast<Block*>(context));
  }
}

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const c10::Device where(c10::DeviceType::CPU);
    if (n == 0) {
      return {nullptr, nullptr, &release, where};
    }
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    const size_t size = rounded(n);
    Block* block = nullptr;
    auto& free = free_[size];
    for (auto each = free.begin(); each != free.end() && block == nullptr; ++each) {
      if (all_reached((*each)->uses)) {
        block = *each;
        free.erase(each);
        break;
      }
    }
    if (block == nullptr) {
      block = new Block{static_cast<char*>(new_memory(size)), size, n, -1, nullptr, {}};
      blocks_.all[block->data] = block;
    }
    block->uses.clear();
    std::memset(block->data, kPoison, size);  // new memory holds anything
    return {block->data, block, &release, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    record(pointer, queue_of(stream.device_index(), stream.id()).end());
    return is_pinned(pointer);
  }

  void record(const void* pointer, Point point) {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    if (Block* block = blocks_.find(pointer)) {
      block->uses.push_back(point);
    }
  }

  bool is_pinned(const void* pointer) {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    return blocks_.find(pointer) != nullptr;
  }

  void empty_cache() override {}  // nothing else needs this memory
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void release(void* context);

  void free(Block* block) {
    std::lock_guard<std::mutex> lock(blocks_.mutex);
    free_[block->size].push_back(block);
  }

  Blocks blocks_;
  std::map<size_t, std::vector<Block*>> free_;
};

PinnedMemory& the_pinned_memory() {
  static auto& memory = *new PinnedMemory();
  return memory;
}

void PinnedMemory::release(void* context) {
  if (context != nullptr) {
    the_pinned_memory().free(static_cast<Block*>(context));
  }
}

}  // namespace

c10::DeviceAllocator& device_memory() { return the_device_memory(); }
at::HostAllocator& pinned_memory() { return the_pinned_memory(); }
bool is_pinned(const void* pointer) { return the_pinned_memory().is_pinned(pointer); }
int device_of(const void* pointer) { return the_device_memory().device_of(pointer); }

void record_pinned_use(const void* pointer, Point point) {
  the_pinned_memory().record(pointer, point);
}

}  // namespace async_cpu
