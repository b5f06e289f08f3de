#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include "bindings/bindings.h"
#include "checkpoint/folder_claim.h"
#include "checkpoint/snapshot.h"

namespace muster {

namespace py = pybind11;
using py::literals::operator""_a;

void bind_checkpoint(py::module_& parent) {
  auto m = parent.def_submodule("_checkpoint");
  m.def(
      "write_snapshot",
      [](const std::filesystem::path& folder, checkpoint::NamedTensors tensors, checkpoint::Metadata metadata,
         std::optional<int> keep, uint64_t shard_bytes) {
        const checkpoint::FolderClaim claim(folder);
        return checkpoint::write_snapshot(folder, {std::move(tensors), std::move(metadata)}, {keep, shard_bytes});
      },
      "folder"_a, "tensors"_a, "metadata"_a, "keep"_a = py::none(), "shard_bytes"_a = uint64_t{1} << 30, Release());
  m.def(
      "read_snapshot",
      [](const std::filesystem::path& folder) {
        auto snapshot = checkpoint::read_snapshot(folder, checkpoint::Memory::of_file);
        return std::pair(std::move(snapshot.tensors), std::move(snapshot.metadata));
      },
      "folder"_a, Release());
  m.def(
      "check_snapshot",
      [](const std::filesystem::path& folder) {
        auto checked = checkpoint::check_snapshot(folder);
        return std::pair(std::move(checked.metadata), std::move(checked.elsewhere));
      },
      "folder"_a, Release());
  m.def("is_part_of_snapshot", &checkpoint::is_part_of_snapshot, "folder"_a, Release());
  m.def(
      "read_safetensors",
      [](const std::filesystem::path& path) {
        checkpoint::TensorSums sums;
        return checkpoint::read_safetensors(path, sums);
      },
      "path"_a, Release());
}

}  // namespace muster
