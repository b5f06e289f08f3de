#include "bindings/thread_interrupt.h"

#include <pybind11/eval.h>

#include <optional>
#include <utility>

namespace muster {

namespace {

namespace py = pybind11;

// CPython up to 3.12 marks the interpreter when an exception is raised in another thread or withdrawn, and takes the
// mark away only where a thread comes to one. With the mark every call of a Python function is slow, and one of 3.11
// that is traced (torch.profiler with a stack, coverage) does not end. So this thread comes to one.
void clear_mark() {
  const auto is_raised = py::reinterpret_steal<py::object>(PyErr_NewException("muster._Withdrawn", nullptr, nullptr));
  const auto nothing = py::eval("lambda: None");
  PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), is_raised.ptr());
  std::optional<py::error_already_set> other;
  for (bool is_there = false; !is_there;) {
    try {
      nothing();
    } catch (py::error_already_set& error) {
      is_there = error.matches(is_raised);
      if (!is_there) other.emplace(std::move(error));  // a signal handler's
    }
  }
  if (other) throw std::move(*other);
}

}  // namespace

int interrupt_thread(unsigned long identity, const py::object& exception) {
  if (!exception.is_none()) return PyThreadState_SetAsyncExc(identity, exception.ptr());
  const int threads = PyThreadState_SetAsyncExc(identity, nullptr);
  clear_mark();
  return threads;
}

}  // namespace muster
