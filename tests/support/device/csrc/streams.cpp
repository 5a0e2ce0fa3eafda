#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <chrono>

#include "memory.h"

namespace async_cpu {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kPool = 32;  // streams of each priority, as with CUDA

thread_local int the_device = 0;
thread_local std::array<int64_t, kDevices> the_streams{};  // 0 is the default stream

std::atomic<SyncDebug> the_sync_debug{SyncDebug::kDefault};

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

int index_of(c10::Device device) { return device.has_index() ? device.index() : the_device; }

double now_ms() {
  using Milliseconds = std::chrono::duration<double, std::milli>;
  return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Event {
  Point point;
  std::shared_ptr<double> time;  // when it was reached, if it is timed
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = device_at(the_device);
    set_current_device(index_of(device));
    return before;
  }
  c10::Device getDevice() const override { return device_at(the_device); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    the_device = index_of(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, device_at(index), the_streams.at(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_at(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return new_stream(index_of(device), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return new_stream(index_of(device), priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    the_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return reached(queue_of(stream).end());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    await_for_host(queue_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { await_device(device); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto& recorded = *static_cast<Event*>(*event);
    Queue& queue = queue_of(stream);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {  // timed
      auto time = std::make_shared<double>(0);
      recorded.time = time;
      recorded.point = queue.put("event", [time] { *time = now_ms(); });
    } else {
      recorded.point = queue.end();
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      queue_of(stream).put_wait(static_cast<Event*>(event)->point);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || reached(static_cast<Event*>(event)->point);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      await(static_cast<Event*>(event)->point);
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto& from = *static_cast<Event*>(first);
    auto& to = *static_cast<Event*>(second);
    TORCH_CHECK(from.time && to.time, "Both events must be made with enable_timing=True.");
    TORCH_CHECK(reached(from.point) && reached(to.point), "Both events must be completed.");
    return *to.time - *from.time;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }
};

// Draws on the host, so that random numbers do not depend on the order in which tasks run.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = device_at(device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(the_device);
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? the_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? the_device : device);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const int device = device_of(pointer);
    TORCH_CHECK(device >= 0, "This address is not in memory of the asynchronous device.");
    return device_at(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = c10::DataPtr(nullptr, storage.device());
    if (size != 0) {
      const c10::Device before = device_at(the_device);
      set_current_device(storage.device().index());
      data = device_memory().allocate(size);
      void* target = data.get();
      const void* source = storage.data();
      const size_t kept = std::min(size, storage.nbytes());
      if (kept != 0) {
        current_queue(the_device).put("resize", [=] { std::memcpy(target, source, kept); });
      }
      set_current_device(before.index());
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

}  // namespace

int current_device() { return the_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "got device ", device, ", expected less than ",
              kDevices);
  the_device = device;
}

Queue& queue_of(c10::Stream stream) { return queue_of(stream.device_index(), stream.id()); }

Queue& current_queue(int device) { return queue_of(device, the_streams.at(device)); }

c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(queue.device), queue.stream);
}

c10::Stream new_stream(int device, bool high_priority) {
  static std::array<std::array<std::atomic<int>, 2>, kDevices> made{};
  const int number = made.at(device)[high_priority]++ % kPool;
  const int64_t id = 1 + 2 * number + (high_priority ? 1 : 0);
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

const at::Generator& default_generator(int device) {
  static auto& all = *new std::array<at::Generator, kDevices>{at::make_generator<Generator>(0),
                                                             at::make_generator<Generator>(1)};
  return all.at(device);
}

void set_sync_debug(SyncDebug mode) { the_sync_debug = mode; }
SyncDebug sync_debug() { return the_sync_debug; }

void await_for_host(int device) { await_for_host(current_queue(device)); }

void await_for_host(Queue& queue) {
  constexpr auto text = "called a synchronizing operation of the asynchronous device";
  TORCH_CHECK(the_sync_debug != SyncDebug::kError, text);
  if (the_sync_debug == SyncDebug::kWarn) {
    TORCH_WARN(text);
  }
  await(queue.end());
}

namespace {

static_assert(kDevices == 2, "default_generator makes two");
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// At load, as the guard: nothing asks for them before a tensor of the device is made.
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(kType, &device_memory());
  at::setHostAllocator(kType, &pinned_memory());
  return true;
}();

}  // namespace

}  // namespace async_cpu
