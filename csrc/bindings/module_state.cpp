// What user code changed of a module's Python attributes since they were noted. Compared by identity: thousands of
// entries in some ten microseconds.
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/noted_container.h"
#include "core/write_trace.h"

namespace muster {

namespace {

namespace py = pybind11;

constexpr size_t kMaxDepth = 6;        // of containers within an attribute
constexpr size_t kMaxItems = 1000;     // larger containers are compared by identity and length
constexpr size_t kMaxEntries = 50000;  // of a module: what is beyond is compared by identity

using NotedContainerPtr = std::shared_ptr<NotedContainer>;

class ModuleState {
 public:
  /// `modules`: the tree, of whose attributes those in `skipped` are left out. Values of `leaf_types`, and `known`
  /// tensors, are compared by identity.
  ModuleState(const py::list& modules, const py::list& known, const py::tuple& leaf_types, const py::list& skipped) {
    for (const auto& module : modules) {
      tree_.insert(module.ptr());
      roots_.push_back(py::reinterpret_borrow<py::object>(module).attr("__dict__"));
      keep_.push_back(py::reinterpret_borrow<py::object>(module));
    }
    for (const auto& tensor : known) {
      known_.insert(THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl());
      keep_.push_back(py::reinterpret_borrow<py::object>(tensor));
    }
    for (const auto& type : leaf_types) leaf_types_.push_back(py::reinterpret_borrow<py::object>(type));
    for (const auto& name : skipped) skipped_.push_back(py::reinterpret_borrow<py::object>(name));
    containers_.resize(roots_.size());
    is_forgotten_.assign(roots_.size(), true);
    holds_tensors_.resize(roots_.size());
    note();
  }

  /// Whatever differs from here on is a change.
  void note() {
    ++generation_;
    for (size_t m = 0; m < roots_.size(); ++m) {
      if (!is_forgotten_[m] && is_as_noted(m)) continue;
      rescan(m);
    }
    if (registry_.size() > 2 * num_containers() + 64) {
      std::erase_if(registry_, [](const auto& item) { return item.second.expired(); });
    }
  }

  /// What differs: (module, path from its __dict__ to a container, keys that are there with another value, keys that
  /// are gone, that container); None for the keys of what is no dict. Something else may stand at the path: then that
  /// differs, too, in a container before it. Lets go of what may keep tensors alive until the next note.
  py::list changes() {
    ++generation_;
    py::list found;
    for (size_t m = 0; m < roots_.size(); ++m) {
      for (const auto& container : containers_[m]) {
        if (std::exchange(container->looked_at, generation_) == generation_ || container->is_as_noted()) continue;
        found.append(container->describe());
      }
      if (holds_tensors_[m]) {
        containers_[m].clear();
        is_forgotten_[m] = true;
      }
    }
    return found;
  }

  /// For Python's garbage collector: attributes may refer to what owns this.
  int traverse(visitproc visit, void* arg) const {
    const auto visit_all = [&](const std::vector<py::object>& objects) {
      for (const auto& object : objects) {
        if (const int result = visit_one(object, visit, arg); result != 0) return result;
      }
      return 0;
    };
    for (const auto* objects : {&keep_, &roots_, &leaf_types_, &skipped_}) {
      if (const int result = visit_all(*objects); result != 0) return result;
    }
    std::unordered_set<const NotedContainer*> seen;
    for (const auto& of_module : containers_) {
      for (const auto& container : of_module) {
        if (!seen.insert(container.get()).second) continue;
        if (const int result = visit_all(container->path); result != 0) return result;
        for (const auto* object : {&container->object, &container->owner, &container->members}) {
          if (const int result = visit_one(*object, visit, arg); result != 0) return result;
        }
        for (const auto& entry : container->entries) {
          if (const int result = visit_one(entry.key, visit, arg); result != 0) return result;
          if (const int result = visit_one(entry.value.kept, visit, arg); result != 0) return result;
        }
      }
    }
    return 0;
  }

  void clear() {
    tree_.clear();
    const auto containers = std::exchange(containers_, {});
    const auto roots = std::exchange(roots_, {});
    const auto kept = std::exchange(keep_, {});
  }

 private:
  static int visit_one(const py::object& object, visitproc visit, void* arg) {
    return object ? visit(object.ptr(), arg) : 0;
  }

  size_t num_containers() const {
    size_t n = 0;
    for (const auto& of_module : containers_) n += of_module.size();
    return n;
  }

  bool is_skipped(PyObject* key) const {
    for (const auto& name : skipped_) {
      if (name.ptr() == key) return true;
    }
    // Names of attributes are interned, but for those that setattr with a computed name made.
    if (!PyUnicode_Check(key)) return false;
    for (const auto& name : skipped_) {
      if (PyUnicode_Compare(name.ptr(), key) == 0) return true;
    }
    return false;
  }

  bool is_as_noted(size_t module) {
    for (const auto& container : containers_[module]) {
      if (container->noted == generation_) continue;
      if (!container->is_as_noted()) return false;
      container->noted = generation_;
    }
    return true;
  }

  void rescan(size_t module) {
    containers_[module].clear();
    is_forgotten_[module] = false;
    holds_tensors_[module] = false;
    std::vector<py::object> path;
    size_t entries = 0;
    std::unordered_set<const NotedContainer*> seen;
    scan(module, roots_[module], py::object(), path, entries, seen);
  }

  void scan(size_t module, py::object object, py::object owner, std::vector<py::object>& path, size_t& entries,
            std::unordered_set<const NotedContainer*>& seen) {
    auto& slot = registry_[object.ptr()];
    auto container = slot.lock();
    const bool is_known = container && container->noted == generation_;
    if (!container) {
      container = std::make_shared<NotedContainer>();
      slot = container;
    }
    if (!seen.insert(container.get()).second) return;
    containers_[module].push_back(container);
    if (!is_known) {
      container->object = object;
      container->owner = std::move(owner);
      container->path = path;
      container->module = module;
      record(*container, path.empty());
      container->noted = generation_;
    }
    entries += container->entries.size();
    if (path.size() >= 2 * kMaxDepth || entries > kMaxEntries) return;
    const bool is_nested = !path.empty();
    for (size_t i = 0; i < container->entries.size(); ++i) {
      const auto& entry = container->entries[i];
      if (entry.value.tensor) {
        holds_tensors_[module] = holds_tensors_[module] || is_nested;
        continue;
      }
      if (!entry.value.kept) continue;
      path.push_back(entry.key ? entry.key : py::int_(i));
      descend(module, entry.value.kept, path, entries, seen);
      path.pop_back();
    }
  }

  void descend(size_t module, const py::object& value, std::vector<py::object>& path, size_t& entries,
               std::unordered_set<const NotedContainer*>& seen) {
    PyObject* const object = value.ptr();
    if (is_leaf(object)) return;
    if (PyDict_Check(object) || PyList_Check(object) || PyTuple_Check(object) || is_set(object)) {
      scan(module, value, py::object(), path, entries, seen);
      return;
    }
    auto dict = py::reinterpret_steal<py::object>(instance_dict(object));
    if (!dict) {
      // Who knows what it holds.
      holds_tensors_[module] = true;
      return;
    }
    path.push_back(py::ellipsis());
    scan(module, std::move(dict), value, path, entries, seen);
    path.pop_back();
  }

  bool is_leaf(PyObject* object) const {
    if (object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
        PyUnicode_CheckExact(object) || PyBytes_CheckExact(object) || PyComplex_CheckExact(object) ||
        PyType_Check(object) || PyFunction_Check(object) || PyCFunction_Check(object) || PyMethod_Check(object) ||
        PyModule_Check(object)) {
      return true;
    }
    if (tree_.contains(object)) return true;
    for (const auto& type : leaf_types_) {
      if (PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0) return true;
    }
    return false;
  }

  void record(NotedContainer& container, bool is_root) {
    container.entries.clear();
    container.members = py::object();
    PyObject* const object = container.object.ptr();
    if (is_set(object)) {
      container.size = PySet_GET_SIZE(object);
      if (static_cast<size_t>(container.size) > kMaxItems) return;
      container.members = py::reinterpret_steal<py::object>(PyFrozenSet_New(object));
      if (!container.members) throw py::error_already_set();
      return;
    }
    if (PyDict_Check(object)) {
      container.size = PyDict_GET_SIZE(object);
      if (!is_root && static_cast<size_t>(container.size) > kMaxItems) return;
      Py_ssize_t position = 0;
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      while (PyDict_Next(object, &position, &key, &value) != 0) {
        container.entries.push_back({py::reinterpret_borrow<py::object>(key), noted(value)});
        if (is_root && is_skipped(key)) container.entries.back().value = noted_identity(value);
      }
      return;
    }
    container.size = PySequence_Fast_GET_SIZE(object);
    if (static_cast<size_t>(container.size) > kMaxItems) return;
    PyObject** const items = PySequence_Fast_ITEMS(object);
    for (Py_ssize_t i = 0; i < container.size; ++i) container.entries.push_back({py::object(), noted(items[i])});
  }

  NotedValue noted(PyObject* value) const {
    NotedValue result;
    result.identity = value;
    if (!is_tensor(value)) {
      result.kept = py::reinterpret_borrow<py::object>(value);
      return result;
    }
    const auto& tensor = THPVariable_Unpack(value);
    result.tensor.emplace(tensor.getIntrusivePtr());
    result.has_version = !known_.contains(tensor.unsafeGetTensorImpl());
    if (result.has_version) result.version = version_of(tensor);
    return result;
  }

  static NotedValue noted_identity(PyObject* value) {
    NotedValue result;
    result.identity = value;
    return result;
  }

  std::vector<py::object> keep_;
  std::vector<py::object> roots_;
  std::unordered_set<PyObject*> tree_;
  std::unordered_set<const c10::TensorImpl*> known_;
  std::vector<py::object> leaf_types_;
  std::vector<py::object> skipped_;
  std::vector<std::vector<NotedContainerPtr>> containers_;  // by module
  std::vector<char> holds_tensors_;                         // by module: in what is noted there, or perhaps
  std::vector<char> is_forgotten_;                          // by module
  std::unordered_map<PyObject*, std::weak_ptr<NotedContainer>> registry_;
  uint64_t generation_ = 0;
};

// Null while it is being made.
ModuleState* made_state(PyObject* self) {
  auto holder = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  return holder.holder_constructed() ? static_cast<ModuleState*>(holder.value_ptr()) : nullptr;
}

// Tensors whose Python hooks are those of another one, in both of torch's kinds.
py::list hooks_that_differ(const py::list& firsts, const py::list& others) {
  py::list found;
  for (size_t i = 0; i < firsts.size(); ++i) {
    const auto* const a = reinterpret_cast<const THPVariable*>(PyList_GET_ITEM(firsts.ptr(), i));
    const auto* const b = reinterpret_cast<const THPVariable*>(PyList_GET_ITEM(others.ptr(), i));
    const auto differ = [](PyObject* x, PyObject* y) {
      return x != y && !(x == nullptr && y == Py_None) && !(x == Py_None && y == nullptr);
    };
    if (differ(a->backward_hooks, b->backward_hooks) ||
        differ(a->post_accumulate_grad_hooks, b->post_accumulate_grad_hooks)) {
      found.append(i);
    }
  }
  return found;
}

// By tensor, what a write changes of it; see WriteTrace.
std::vector<std::tuple<int64_t, uintptr_t, uint64_t>> write_traces(const py::list& tensors) {
  std::vector<std::tuple<int64_t, uintptr_t, uint64_t>> traces;
  for (const auto& tensor : tensors) {
    const auto trace = WriteTrace::of(THPVariable_Unpack(tensor.ptr()), kSamplesOfBuffer);
    traces.emplace_back(trace.version, reinterpret_cast<uintptr_t>(trace.memory), trace.sample);
  }
  return traces;
}

}  // namespace

void bind_module_state(py::module_& m) {
  const auto collect = [](PyHeapTypeObject* heap_type) {
    auto* const type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      const auto* const state = made_state(self);
      return state == nullptr ? 0 : state->traverse(visit, arg);
    };
    type->tp_clear = [](PyObject* self) {
      if (auto* const state = made_state(self)) state->clear();
      return 0;
    };
  };
  py::class_<ModuleState>(m, "ModuleState", "What user code changed of modules' attributes since they were noted.",
                          py::custom_type_setup(collect))
      .def(py::init<const py::list&, const py::list&, const py::tuple&, const py::list&>(), py::arg("modules"),
           py::arg("known"), py::arg("leaf_types"), py::arg("skipped"))
      .def("note", &ModuleState::note)
      .def("changes", &ModuleState::changes);
  m.def("hooks_that_differ", &hooks_that_differ, py::arg("firsts"), py::arg("others"),
        "Indices of tensors whose Python hooks are other than those of the first ones.");
  m.def("write_traces", &write_traces, py::arg("tensors"), "By tensor, what a write changes of it.");
}

}  // namespace muster
