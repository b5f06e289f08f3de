// The safetensors format (huggingface/safetensors, README "Format"): 8 bytes of little-endian header length, a JSON
// header, the tensors' bytes without gaps.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/file.h"

namespace muster::checkpoint {

using NamedTensors = std::map<std::string, at::Tensor>;

/// The upper bound that the format's own library sets.
inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;

/// Throws InvalidArgument for a tensor that a file cannot hold: not on the CPU, not strided, of another dtype than
/// bool, the integers, float8 (e4m3fn, e5m2), float16, bfloat16, float32 and float64, or named "__metadata__".
void check_storable(const std::string& name, const at::Tensor& tensor);
/// The same of a tensor on any device that has memory, of which a copy on the CPU is stored.
void check_copy_storable(const std::string& name, const at::Tensor& tensor);

/// The format's name of a dtype that check_storable lets pass: "F32".
std::string dtype_name(at::ScalarType dtype);

/// The checksums of a file and of the bytes of each of its tensors.
struct TensorSums {
  FileSum file;
  std::map<std::string, uint32_t> crc32s;
};

/// Writes a file that did not exist, and flushes it to the disk. `hashes`: as of a FileWriter. Throws as
/// check_storable, and CheckpointError where the system refuses.
TensorSums write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors, bool hashes = false);

/// Where tensors are that were read: in memory of their own, or in that of their file (FileReader::map_sections), all
/// together until the last one goes.
enum class Memory { own, of_file };

/// All tensors of a file, contiguous, on the CPU. Throws CheckpointError for a file that is damaged, before anything
/// is allocated that the file could not fill. Sets `sums`.
NamedTensors read_safetensors(const std::filesystem::path& path, TensorSums& sums, bool hashes = false,
                              Memory memory = Memory::own);

}  // namespace muster::checkpoint
