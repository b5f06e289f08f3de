// A temporary folder of a test.
#pragma once

#include <filesystem>

namespace muster::testing {

/// A new one, removed with the object.
struct Folder {
  Folder();
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path path;
};

}  // namespace muster::testing
