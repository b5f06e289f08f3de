#include "checkpoint/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "checkpoint/json.h"
#include "core/plain_memory.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

static_assert(std::endian::native == std::endian::little, "tensors are written as they lie in memory");

constexpr std::pair<std::string_view, at::ScalarType> kDTypes[] = {
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"C64", at::kComplexFloat},
};

constexpr std::string_view kMetadata = "__metadata__";
constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxDimensions = 64;

std::optional<std::string_view> name_of_dtype(at::ScalarType dtype) {
  for (const auto& [name, type] : kDTypes) {
    if (type == dtype) return name;
  }
  return std::nullopt;
}

struct Entry {
  std::string name;
  at::ScalarType dtype{};
  std::vector<int64_t> sizes;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Bytes of a tensor; empty where they cannot be counted, nor its strides.
std::optional<uint64_t> bytes_of(const Entry& entry) {
  uint64_t count = c10::elementSize(entry.dtype);
  bool is_empty = false;
  for (const int64_t size : entry.sizes) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    if (__builtin_mul_overflow(count, std::max<uint64_t>(static_cast<uint64_t>(size), 1), &count)) return std::nullopt;
  }
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return is_empty ? 0 : count;
}

Entry read_entry(JsonReader& json, const std::string& name) {
  Entry entry;
  entry.name = name;
  std::vector<int64_t> offsets;
  bool has_dtype = false;
  bool has_shape = false;
  json.read_object([&](const std::string& key) {
    if (key == "dtype") {
      const auto text = json.read_string();
      const auto* found =
          std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& known) { return known.first == text; });
      if (found == std::end(kDTypes)) json.fail("tensor '" + name + "' has dtype '" + text + "', which is unknown,");
      entry.dtype = found->second;
      has_dtype = true;
    } else if (key == "shape") {
      json.read_array([&] {
        if (entry.sizes.size() == kMaxDimensions) json.fail("tensor '" + name + "' has too many dimensions");
        entry.sizes.push_back(json.read_integer());
      });
      has_shape = true;
    } else if (key == "data_offsets") {
      json.read_array([&] {
        if (offsets.size() == 2) json.fail("tensor '" + name + "' has more than two offsets");
        offsets.push_back(json.read_integer());
      });
    } else {
      json.fail("tensor '" + name + "' has an unknown property '" + key + "'");
    }
  });
  if (!has_dtype || !has_shape || offsets.size() != 2) {
    json.fail("tensor '" + name + "' lacks its dtype, shape or offsets");
  }
  const auto bytes = bytes_of(entry);
  if (!bytes || offsets[0] < 0 || offsets[1] < offsets[0] || static_cast<uint64_t>(offsets[1] - offsets[0]) != *bytes) {
    json.fail("the offsets of tensor '" + name + "' do not fit its shape");
  }
  entry.begin = static_cast<uint64_t>(offsets[0]);
  entry.end = static_cast<uint64_t>(offsets[1]);
  return entry;
}

// In the order of their bytes, which they cover without gaps.
std::vector<Entry> read_header(JsonReader& json, uint64_t data_bytes) {
  std::vector<Entry> entries;
  json.read_object([&](const std::string& key) {
    if (key == kMetadata) {
      json.read_object([&](const std::string&) { json.read_string(); });
    } else {
      entries.push_back(read_entry(json, key));
    }
  });
  json.read_end();
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t next = 0;
  for (const auto& entry : entries) {
    if (entry.begin != next) json.fail("tensor '" + entry.name + "' overlaps another one or leaves a gap");
    next = entry.end;
  }
  if (next != data_bytes) json.fail("the tensors do not fill the file, or end behind it,");
  return entries;
}

// Largest elements first, so that all are aligned.
std::vector<Entry> lay_out(const NamedTensors& tensors) {
  std::vector<Entry> entries;
  for (const auto& [name, tensor] : tensors) {
    check_storable(name, tensor);
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  uint64_t next = 0;
  for (auto& entry : entries) {
    entry.begin = next;
    next += tensors.at(entry.name).nbytes();
    entry.end = next;
  }
  return entries;
}

std::string header_of(const std::vector<Entry>& entries) {
  std::string header = "{";
  for (const auto& entry : entries) {
    if (header.size() > 1) header += ',';
    header += json_string(entry.name) + R"(:{"dtype":")" + dtype_name(entry.dtype) + R"(","shape":[)";
    for (size_t d = 0; d < entry.sizes.size(); ++d) {
      if (d > 0) header += ',';
      header += std::to_string(entry.sizes[d]);
    }
    header += "],\"data_offsets\":[" + std::to_string(entry.begin) + ',' + std::to_string(entry.end) + "]}";
  }
  header += '}';
  header.resize((header.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  return header;
}

NamedTensors copied(FileReader& file, const std::vector<Entry>& entries, std::vector<uint32_t>& crc32s) {
  NamedTensors tensors;
  std::vector<Section> sections;
  for (const auto& entry : entries) {
    const auto tensor = at::empty(entry.sizes, entry.dtype);
    sections.push_back({tensor.mutable_data_ptr(), tensor.nbytes()});
    tensors.emplace(entry.name, tensor);
  }
  crc32s = file.read_sections(sections);
  return tensors;
}

// Nothing where they cannot be.
std::optional<NamedTensors> mapped(FileReader& file, const std::vector<Entry>& entries, std::vector<uint32_t>& crc32s) {
  std::vector<size_t> sizes;
  for (const auto& entry : entries) sizes.push_back(static_cast<size_t>(entry.end - entry.begin));
  const auto map = file.map_sections(sizes, crc32s);
  if (!map) return std::nullopt;
  NamedTensors tensors;
  for (const auto& entry : entries) {
    auto* const data = map.get() + entry.begin;
    auto tensor = at::from_blob(data, entry.sizes, [map](void*) {}, entry.dtype);
    const bool is_aligned = reinterpret_cast<uintptr_t>(data) % c10::elementSize(entry.dtype) == 0;
    tensors.emplace(entry.name, is_aligned ? std::move(tensor) : tensor.clone());
  }
  return tensors;
}

[[noreturn]] void refuse_tensor(const std::string& name) {
  throw InvalidArgument(
      "a snapshot cannot hold '" + name +
      "': it stores strided tensors on the CPU, of real dtypes or complex64, under any name but __metadata__");
}

}  // namespace

void check_storable(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) refuse_tensor(name);
  check_copy_storable(name, tensor);
}

void check_copy_storable(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || tensor.layout() != at::kStrided || name == kMetadata ||
      !name_of_dtype(tensor.scalar_type()) || tensor.dim() > static_cast<int64_t>(kMaxDimensions)) {
    refuse_tensor(name);
  }
}

std::string dtype_name(at::ScalarType dtype) { return std::string(name_of_dtype(dtype).value_or("")); }

TensorSums write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors, bool hashes) {
  const auto entries = lay_out(tensors);
  const std::string header = header_of(entries);
  if (header.size() > kMaxHeaderBytes) {
    throw InvalidArgument("the names of " + std::to_string(entries.size()) +
                          " tensors do not fit into one file's header; write them as fewer tensors");
  }
  FileWriter file(path, hashes);
  const uint64_t length = header.size();
  file.write(&length, sizeof(length));
  file.write(header.data(), header.size());
  file.end_section();
  TensorSums sums;
  for (const auto& entry : entries) {
    const auto tensor = in_plain_memory(tensors.at(entry.name)).contiguous();
    file.write(tensor.const_data_ptr(), tensor.nbytes());
    sums.crc32s.emplace(entry.name, file.end_section());
  }
  sums.file = file.finish();
  return sums;
}

NamedTensors read_safetensors(const std::filesystem::path& path, TensorSums& sums, bool hashes, Memory memory) {
  FileReader file(path, hashes);
  uint64_t length = 0;
  if (file.size() >= kLengthBytes) file.read(&length, sizeof(length));
  if (file.size() < kLengthBytes || length > file.rest() || length > kMaxHeaderBytes) {
    throw CheckpointError("'" + path.string() + "' is damaged: " + std::to_string(file.size()) +
                          " bytes cannot hold a header of " + std::to_string(length) + "; load another snapshot");
  }
  const std::string header = file.read_text(length);
  if (!header.starts_with('{')) {
    throw CheckpointError("'" + path.string() + "' is no safetensors file; load another snapshot");
  }
  JsonReader json(header, path.string());
  file.end_section();
  const auto entries = read_header(json, file.rest());
  std::vector<uint32_t> crc32s;
  std::optional<NamedTensors> found;
  if (memory == Memory::of_file) found = mapped(file, entries, crc32s);
  auto tensors = found ? std::move(*found) : copied(file, entries, crc32s);
  for (size_t i = 0; i < entries.size(); ++i) sums.crc32s.insert_or_assign(entries[i].name, crc32s[i]);
  sums.file = file.sum();
  return tensors;
}

}  // namespace muster::checkpoint
