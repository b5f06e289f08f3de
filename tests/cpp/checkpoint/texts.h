// Whole files, as tests read and replace them.
#pragma once

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace muster::testing {

inline std::string contents(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

inline void replace(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

}  // namespace muster::testing
