// One container of a module's attributes as it was noted, and how it differs.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace muster {

bool is_tensor(PyObject* object);
bool is_set(PyObject* object);

/// The `__dict__` of an object: a new reference; null where it has none.
PyObject* instance_dict(PyObject* object);

/// A tensor's writes are counted by its version, which inference tensors do not have: 0 for these.
uint32_t version_of(const at::Tensor& tensor);

/// A value as it was: kept alive, but for tensors, whose memory would be kept.
struct NotedValue {
  PyObject* identity = nullptr;
  pybind11::object kept;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensor;
  uint32_t version = 0;
  bool has_version = false;

  /// Whether `value` is this one, and a tensor was not written since.
  bool is(PyObject* value) const;
};

/// An item of a container.
struct NotedEntry {
  pybind11::object key;  // of a dict; else null
  NotedValue value;
};

/// A dict (that of an object, too), list, tuple or set.
struct NotedContainer {
  pybind11::object object;
  pybind11::object owner;              // whose __dict__ it is; else null
  std::vector<pybind11::object> path;  // from the module's __dict__ to it
  size_t module = 0;
  Py_ssize_t size = 0;
  std::vector<NotedEntry> entries;  // empty where it is too large
  pybind11::object members;         // of a set
  uint64_t noted = 0;
  uint64_t looked_at = 0;

  /// Whether it holds what was noted, by identity.
  bool is_as_noted() const;
  /// How it differs: (module, path, keys with another value, keys that are gone, the container); None for the keys of
  /// what is no dict.
  pybind11::tuple describe() const;
};

}  // namespace muster
