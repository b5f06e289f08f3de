#include <muster/error.h>
#include <muster/parameters_after.h>
#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

#include "bindings/bindings.h"

namespace muster {
namespace {

namespace py = pybind11;

// An attribute of the class says that they are whole.
py::dict attributes_of(const CommError& error) {
  using py::literals::operator""_a;
  return parameters_after(error) == Parameters::torn ? py::dict("parameters"_a = "torn") : py::dict();
}

// Looked up when an error arrives: the module holds nothing that would outlive the interpreter.
void set_error(const char* name, const Error& error, const py::dict& attributes = {}) {
  const py::object type = py::module_::import("muster.errors").attr(name);
  const py::object instance = type(error.what());
  for (const auto& [key, value] : attributes) py::setattr(instance, key, value);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

void translate(std::exception_ptr pointer) {
  using py::literals::operator""_a;
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (const PeerLost& e) {
    set_error("PeerLost", e, py::dict("rank"_a = e.rank(), **attributes_of(e)));
  } catch (const RemoteError& e) {
    set_error("RemoteError", e,
              py::dict("rank"_a = e.rank(), "replica"_a = e.replica(), "type"_a = e.type(), "text"_a = e.text()));
  } catch (const Timeout& e) {
    set_error("Timeout", e, attributes_of(e));
  } catch (const CommError& e) {
    set_error("CommError", e, attributes_of(e));
  } catch (const InvalidArgument& e) {
    set_error("InvalidArgument", e);
  } catch (const LayoutMismatch& e) {
    set_error("LayoutMismatch", e);
  } catch (const NonFinite& e) {
    set_error("NonFinite", e);
  } catch (const CheckpointError& e) {
    set_error("CheckpointError", e);
  } catch (const AuthError& e) {
    set_error("AuthError", e);
  } catch (const NotBuilt& e) {
    set_error("NotBuilt", e);
  } catch (const Error& e) {
    set_error("Error", e);
  } catch (python_error& e) {
    e.restore();
  } catch (const c10::IndexError& e) {
    PyErr_SetString(PyExc_IndexError, e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what_without_backtrace());
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  }
}

[[noreturn]] void raise(const std::string& name, const std::string& message) {
  if (name == "InvalidArgument") throw InvalidArgument(message);
  if (name == "LayoutMismatch") throw LayoutMismatch(message);
  if (name == "CommError") throw CommError(message);
  if (name == "PeerLost") throw PeerLost(3, message);
  if (name == "Timeout") throw Timeout(message);
  if (name == "RemoteError") throw RemoteError(3, 7, "ValueError", "bad batch", message);
  if (name == "NonFinite") throw NonFinite(message);
  if (name == "CheckpointError") throw CheckpointError(message);
  if (name == "AuthError") throw AuthError(message);
  if (name == "NotBuilt") throw NotBuilt(message);
  throw Error(message);
}

// As an exception of a Python hook crosses autograd.
[[noreturn]] void raise_through_torch(const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  python_error error;
  error.persist();
  throw std::move(error);
}

}  // namespace

void bind_errors(py::module_& m) {
  py::register_local_exception_translator(&translate);
  m.def("_raise", &raise, "For tests: throws the C++ error of this name.");
  m.def("_raise_through_torch", &raise_through_torch, "For tests: throws a Python exception as torch does.");
}

}  // namespace muster
