// Python functions that C++ threads call.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "bindings/bindings.h"

namespace muster {

/// A Python object that C++ threads hold: its last reference may go without the GIL.
inline std::shared_ptr<pybind11::object> keep(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* kept) {
            const pybind11::gil_scoped_acquire gil;
            delete kept;
          }};
}

/// Takes the GIL for the call; empty for None.
inline std::function<void()> callback(const pybind11::object& function) {
  if (function.is_none()) return {};
  return [kept = keep(function)] {
    const pybind11::gil_scoped_acquire gil;
    (*kept)();
  };
}

}  // namespace muster
