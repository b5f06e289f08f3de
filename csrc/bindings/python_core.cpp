#include "bindings/python_core.h"

#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "core/replica_context.h"

namespace muster {
namespace {

namespace py = pybind11;

// What str() gives, in UTF-8, with what that cannot hold escaped.
std::string text_of(const py::object& error) {
  const auto text = py::reinterpret_steal<py::object>(PyObject_Str(error.ptr()));
  const auto bytes = py::reinterpret_steal<py::object>(
      text ? PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace") : nullptr);
  if (bytes) return py::cast<std::string>(bytes);
  PyErr_Clear();
  return "(its __str__ raises)";
}

Failure describe_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& e) {
    const py::gil_scoped_acquire gil;
    const auto errors = py::module_::import("muster.errors");
    Failure failure{py::cast<std::string>(e.type().attr("__name__")), text_of(e.value())};
    if (e.matches(errors.attr("RemoteError"))) failure.kind = Failure::Kind::remote;
    if (e.matches(errors.attr("CommError"))) failure.kind = Failure::Kind::transport;
    return failure;
  } catch (...) {
    return describe_cpp_error(error);
  }
}

// Autograd leaves what a Python hook or function raised in the thread's error indicator and throws a stand-in.
std::exception_ptr capture_error(std::exception_ptr error) {
  const py::gil_scoped_acquire gil;
  if (PyErr_Occurred() == nullptr) return error;
  py::error_already_set raised;
  const auto replica = current_replica();
  raised.value().attr("add_note")("[raised in backward of replica " + std::to_string(replica->replica) + "]");
  return std::make_exception_ptr(std::move(raised));
}

}  // namespace

std::shared_ptr<StrategyCore> of_python(std::shared_ptr<StrategyCore> core) {
  core->session().failures().set_handlers(describe_error, capture_error);
  auto* const raw = core.get();
  return {raw, [owner = std::move(core)](StrategyCore*) mutable {
            if (PyGILState_Check() == 0) return owner.reset();
            const WithoutGil without_gil;
            owner.reset();
          }};
}

}  // namespace muster
