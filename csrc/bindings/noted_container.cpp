#include "bindings/noted_container.h"

#include <unordered_map>

namespace muster {

namespace py = pybind11;

namespace {

bool same_members(PyObject* a, PyObject* b) {
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

}  // namespace

bool is_tensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

bool is_set(PyObject* object) { return PyAnySet_Check(object) != 0; }

PyObject* instance_dict(PyObject* object) {
  if (Py_TYPE(object)->tp_dictoffset == 0) return nullptr;
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);
  if (dict == nullptr) PyErr_Clear();
  return dict;
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

bool NotedValue::is(PyObject* value) const {
  if (value != identity) return false;
  if (!tensor) return true;
  if (!is_tensor(value)) return false;  // another object at the same address
  const auto& now = THPVariable_Unpack(value);
  return tensor->_unsafe_get_target() == now.unsafeGetTensorImpl() && (!has_version || version_of(now) == version);
}

bool NotedContainer::is_as_noted() const {
  PyObject* const current = object.ptr();
  if (owner) {
    const auto dict = py::reinterpret_steal<py::object>(instance_dict(owner.ptr()));
    if (dict.ptr() != current) return false;
  }
  if (is_set(current)) {
    if (PySet_GET_SIZE(current) != size) return false;
    return !members || same_members(current, members.ptr());
  }
  if (PyDict_Check(current)) {
    if (PyDict_GET_SIZE(current) != size) return false;
    if (entries.empty()) return true;
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (const auto& entry : entries) {
      if (PyDict_Next(current, &position, &key, &value) == 0) return false;
      if (key != entry.key.ptr() || !entry.value.is(value)) return false;
    }
    return true;
  }
  if (PySequence_Fast_GET_SIZE(current) != size) return false;
  PyObject** const items = PySequence_Fast_ITEMS(current);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].value.is(items[i])) return false;
  }
  return true;
}

py::tuple NotedContainer::describe() const {
  py::tuple place(path.size());
  for (size_t i = 0; i < path.size(); ++i) place[i] = path[i];
  PyObject* const current = object.ptr();
  if (!PyDict_Check(current) || (entries.empty() && size > 0)) {
    return py::make_tuple(module, place, py::none(), py::none(), object);
  }
  py::list changed;
  py::list gone;
  std::unordered_map<PyObject*, const NotedValue*> before;
  for (const auto& entry : entries) before[entry.key.ptr()] = &entry.value;
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(current, &position, &key, &value) != 0) {
    const auto known = before.find(key);
    if (known == before.end() || !known->second->is(value)) changed.append(py::reinterpret_borrow<py::object>(key));
  }
  for (const auto& entry : entries) {
    const int is_there = PyDict_Contains(current, entry.key.ptr());
    if (is_there < 0) PyErr_Clear();
    if (is_there == 0) gone.append(entry.key);
  }
  return py::make_tuple(module, place, changed, gone, object);
}

}  // namespace muster
