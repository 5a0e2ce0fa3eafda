// What Python sees of the asynchronous device.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>

#include "collectives.h"
#include "memory.h"
#include "streams.h"

namespace py = pybind11;

namespace async_cpu {

namespace {

// The host blocks without Python's lock, which other threads may need.
void release_python_lock(bool blocks) {
  static thread_local PyThreadState* state = nullptr;
  if (blocks) {
    state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  } else if (state != nullptr) {
    PyEval_RestoreThread(state);
    state = nullptr;
  }
}

py::object ran_to_python() {
  py::list found;
  for (const Ran& ran : recorded_tasks()) {
    found.append(py::make_tuple(ran.name, ran.device, ran.stream, ran.start_us, ran.end_us));
  }
  return found;
}

using MakeGloo = std::function<c10::intrusive_ptr<c10d::Backend>(int)>;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  about_to_block = release_python_lock;
  m.attr("DEVICES") = kDevices;
  m.def("current_device", &current_device);
  m.def("set_current_device", &set_current_device);
  m.def("set_pace", [](uint64_t seed, double delay_us, double held, double quiet_ms) {
    set_pace({seed, delay_us, held, quiet_ms});
  });
  m.def("pace", [] {
    const Pace now = pace();
    return py::make_tuple(now.seed, now.delay_us, now.held, now.quiet_ms);
  });
  m.def("stall", [](int device) { current_queue(device).put_stall(); });
  m.def("set_sync_debug", [](int mode) { set_sync_debug(static_cast<SyncDebug>(mode)); });
  m.def("sync_debug", [] { return static_cast<int>(sync_debug()); });
  m.def("default_generator", &default_generator);
  m.def("record_tasks", &record_tasks);
  m.def("recorded_tasks", &ran_to_python);
  m.def("stop", &stop_queues, py::call_guard<py::gil_scoped_release>());
  py::class_<Collectives, c10::intrusive_ptr<Collectives>, c10d::Backend>(m, "Collectives")
      .def(py::init([](int rank, int size, MakeGloo make) {
        return c10::make_intrusive<Collectives>(rank, size, std::move(make));
      }));
}

}  // namespace async_cpu
