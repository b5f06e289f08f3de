#include "checkpoint/manifest.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <string_view>

#include "checkpoint/crc32.h"
#include "checkpoint/json.h"
#include "checkpoint/sha256.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

// About a million tensors. None is written that would not be read.
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 27;

std::string hex_of(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

template <class T>
std::string members(const Metadata& metadata, const std::function<std::string(const T&)>& text_of) {
  std::string text = "{";
  for (const auto& [key, value] : metadata) {
    const T* own = std::get_if<T>(&value);
    if (own == nullptr) continue;
    if (text.size() > 1) text += ',';
    text += json_string(key) + ':' + text_of(*own);
  }
  return text + '}';
}

std::string decimal(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

uint32_t read_crc32(JsonReader& json) {
  const auto text = json.read_string();
  uint32_t value = 0;
  if (text.size() != 8 || std::from_chars(text.data(), text.data() + 8, value, 16).ptr != text.data() + 8) {
    json.fail("expected a checksum of 8 hexadecimal digits");
  }
  return value;
}

// Hexadecimal, of 32 bytes.
std::string read_digest(JsonReader& json) {
  auto text = json.read_string();
  if (text.size() != 64 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    json.fail("expected a digest of 64 hexadecimal digits");
  }
  return text;
}

// Keyed with what the secret gives for this alone: nothing that is signed elsewhere passes for a manifest.
std::string signature_of(std::string_view inner, const net::JobSecret& secret, Pieces pieces) {
  const char* const label = pieces == Pieces::all ? "muster snapshot manifest" : "muster snapshot part";
  return hex_of_digest(hmac_sha256(hmac_sha256(secret, label), inner));
}

void check_signature(const std::filesystem::path& path, const std::string& found, const std::string& expected,
                     Pieces pieces) {
  if (found == expected) return;
  if (pieces == Pieces::some) {
    throw CheckpointError(
        "the part '" + path.string() + "' " +
        (found.empty() ? "has no signature" : "was signed with another job secret, or changed since") +
        "; give all workers and servers of the job one secret (MUSTER_SECRET_FILE)");
  }
  const std::string folder = path.parent_path().string();
  throw CheckpointError(
      "'" + path.string() + "' " +
      (found.empty() ? "has no signature, and a job secret is set (MUSTER_SECRET_FILE)"
                     : "was signed with another job secret than that of MUSTER_SECRET_FILE, or changed by somebody who "
                       "does not know it; give the secret that it was written with") +
      "; if you trust what is there, take it with `muster checkpoint sign " + folder + "`");
}

double read_double(JsonReader& json) {
  const auto text = json.read_string();
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) json.fail("expected a decimal number");
  return value;
}

// A name in the snapshot's own folder.
std::string read_file_name(JsonReader& json) {
  auto name = json.read_string();
  if (name.empty() || name.find_first_of(std::string_view("/\0", 2)) != std::string::npos || name.starts_with('.')) {
    json.fail("what is no name of a shard");
  }
  return name;
}

Shard read_shard(JsonReader& json) {
  Shard shard;
  int seen = 0;
  json.read_object([&](const std::string& key) {
    ++seen;
    if (key == "file") {
      shard.file = read_file_name(json);
    } else if (key == "bytes") {
      shard.sum.bytes = static_cast<uint64_t>(json.read_integer());
    } else if (key == "crc32") {
      shard.sum.crc32 = read_crc32(json);
    } else if (key == "sha256") {
      shard.sum.sha256 = read_digest(json);
      --seen;
    } else if (key == "host") {
      shard.host = json.read_string();
      if (!is_host_name(shard.host)) json.fail("what is no name of a host");
      --seen;
    } else {
      json.fail("a shard has an unknown property '" + key + "'");
    }
  });
  if (seen != 3) json.fail("a shard lacks its file, bytes or checksum");
  return shard;
}

template <class Read>
void read_members(JsonReader& json, Metadata& metadata, const Read& read) {
  json.read_object([&](const std::string& key) {
    if (!metadata.emplace(key, read()).second) json.fail("'" + key + "' comes twice in the metadata");
  });
}

Piece read_piece(JsonReader& json, const TensorEntry& of, const std::vector<Shard>& shards) {
  Piece piece;
  piece.name = of.name;
  int seen = 0;
  json.read_object([&](const std::string& key) {
    if (key == "name") {
      piece.name = json.read_string();
      return;
    }
    ++seen;
    if (key == "shard") {
      const auto shard = json.read_integer();
      if (shard < 0 || static_cast<size_t>(shard) >= shards.size()) json.fail("a piece in a file that is not listed");
      piece.shard = static_cast<size_t>(shard);
    } else if (key == "begin") {
      piece.begin = json.read_integer();
    } else if (key == "count") {
      piece.count = json.read_integer();
    } else if (key == "crc32") {
      piece.crc32 = read_crc32(json);
    } else {
      json.fail("a piece has an unknown property '" + key + "'");
    }
  });
  if (seen != 4) json.fail("a piece lacks its file, place or checksum");
  return piece;
}

// Elements of a shape; fails where they cannot be counted.
int64_t elements_of(JsonReader& json, const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(count, size, &count)) json.fail("a shape that no tensor has");
  }
  return count;
}

TensorEntry read_entry(JsonReader& json, const std::vector<Shard>& shards, Pieces pieces) {
  TensorEntry entry;
  int seen = 0;
  json.read_object([&](const std::string& key) {
    ++seen;
    if (key == "name") {
      entry.name = json.read_string();
    } else if (key == "dtype") {
      entry.dtype = json.read_string();
    } else if (key == "shape") {
      json.read_array([&] { entry.shape.push_back(json.read_integer()); });
    } else if (key == "pieces" && seen == 4) {
      json.read_array([&] { entry.pieces.push_back(read_piece(json, entry, shards)); });
    } else {
      json.fail("a tensor has an unknown property '" + key + "', or one out of order");
    }
  });
  if (seen != 4) json.fail("a tensor lacks its name, dtype, shape or pieces");
  const auto all = elements_of(json, entry.shape);
  int64_t next = 0;
  for (const auto& piece : entry.pieces) {
    const bool is_next = pieces == Pieces::all ? piece.begin == next : piece.begin >= next;
    if (!is_next || piece.count < 0 || __builtin_add_overflow(piece.begin, piece.count, &next)) {
      json.fail("the pieces of '" + entry.name + "' overlap or leave a gap");
    }
  }
  if ((pieces == Pieces::all ? next != all : next > all) || entry.pieces.empty()) {
    json.fail("the pieces of '" + entry.name + "' do not fill its shape");
  }
  return entry;
}

void read_inner(JsonReader& json, Manifest& manifest, Pieces pieces) {
  auto& [metadata, shards, tensors] = manifest;
  int64_t version = 0;
  json.read_object([&](const std::string& key) {
    if (key == "version") {
      version = json.read_integer();
      if (version != kVersion) {
        json.fail("its version is " + std::to_string(version) + " and this Muster reads " + std::to_string(kVersion));
      }
    } else if (version == 0) {
      json.fail("expected the version first");
    } else if (key == "strings") {
      read_members(json, metadata, [&] { return json.read_string(); });
    } else if (key == "int64s") {
      read_members(json, metadata, [&] { return json.read_integer(); });
    } else if (key == "doubles") {
      read_members(json, metadata, [&] { return read_double(json); });
    } else if (key == "shards") {
      json.read_array([&] { shards.push_back(read_shard(json)); });
    } else if (key == "tensors") {
      json.read_array([&] { tensors.push_back(read_entry(json, shards, pieces)); });
    } else {
      json.fail("an unknown property '" + key + "'");
    }
  });
  if (version == 0) json.fail("it has no version");
}

}  // namespace

bool is_host_name(const std::string& text) {
  constexpr size_t kMostCharacters = 255;
  return !text.empty() && text.size() <= kMostCharacters &&
         std::ranges::all_of(text, [](char c) { return c >= ' ' && c <= '~'; });
}

std::string manifest_of(const Manifest& manifest, const std::optional<net::JobSecret>& secret, Pieces pieces) {
  const auto& metadata = manifest.metadata;
  std::string text = "{\"version\":" + std::to_string(kVersion);
  text += ",\"strings\":" + members<std::string>(metadata, [](const std::string& value) { return json_string(value); });
  text += ",\"int64s\":" + members<int64_t>(metadata, [](int64_t value) { return std::to_string(value); });
  text += ",\"doubles\":" + members<double>(metadata, [](double value) { return json_string(decimal(value)); });
  text += ",\"shards\":[";
  for (const auto& shard : manifest.shards) {
    if (text.back() != '[') text += ',';
    text += "{\"file\":" + json_string(shard.file) + ",\"bytes\":" + std::to_string(shard.sum.bytes) + ",\"crc32\":\"" +
            hex_of(shard.sum.crc32) + '"';
    if (!shard.sum.sha256.empty()) text += ",\"sha256\":\"" + shard.sum.sha256 + '"';
    if (!shard.host.empty()) text += ",\"host\":" + json_string(shard.host);
    text += '}';
  }
  text += "],\"tensors\":[";
  for (const auto& tensor : manifest.tensors) {
    if (text.back() != '[') text += ',';
    text += "{\"name\":" + json_string(tensor.name) + ",\"dtype\":" + json_string(tensor.dtype) + ",\"shape\":[";
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      if (d > 0) text += ',';
      text += std::to_string(tensor.shape[d]);
    }
    text += "],\"pieces\":[";
    for (const auto& piece : tensor.pieces) {
      if (text.back() != '[') text += ',';
      text += "{\"shard\":" + std::to_string(piece.shard);
      if (piece.name != tensor.name) text += ",\"name\":" + json_string(piece.name);
      text += ",\"begin\":" + std::to_string(piece.begin) + ",\"count\":" + std::to_string(piece.count) +
              ",\"crc32\":\"" + hex_of(piece.crc32) + "\"}";
    }
    text += "]}";
  }
  text += "]}";
  const auto signature = secret ? "\"hmac\":\"" + signature_of(text, *secret, pieces) + "\"," : std::string();
  text = "{\"crc32\":\"" + hex_of(crc32(text.data(), text.size())) + "\"," + signature + "\"manifest\":" + text + "}\n";
  if (text.size() <= kMaxManifestBytes) return text;
  throw CheckpointError("values other than tensors would make a manifest of " + std::to_string(text.size() >> 20) +
                        " MiB, and at most " + std::to_string(kMaxManifestBytes >> 20) +
                        " are read again; save long lists and texts as tensors");
}

std::string manifest_text(const std::filesystem::path& path) {
  FileReader file(path);
  if (file.size() <= kMaxManifestBytes) return file.read_text(file.size());
  throw CheckpointError("'" + path.string() + "' is too long for a manifest; load another snapshot");
}

Manifest read_manifest(const std::filesystem::path& path, const std::optional<net::JobSecret>& secret, Pieces pieces) {
  return parse_manifest(manifest_text(path), path, secret, pieces);
}

Manifest parse_manifest(const std::string& text, const std::filesystem::path& path,
                        const std::optional<net::JobSecret>& secret, Pieces pieces) {
  JsonReader json(text, path.string());
  Manifest manifest;
  std::optional<uint32_t> expected;
  std::string signature;
  std::string_view inner;
  json.read_object([&](const std::string& key) {
    if (key == "crc32") {
      expected = read_crc32(json);
    } else if (key == "hmac" && inner.empty()) {
      signature = read_digest(json);
    } else if (key == "manifest" && expected) {
      const size_t begin = json.position();
      read_inner(json, manifest, pieces);
      inner = std::string_view(text).substr(begin, json.position() - begin);
      if (crc32(inner.data(), inner.size()) != *expected) json.fail("its checksum differs");
    } else {
      json.fail("an unknown property '" + key + "'");
    }
  });
  json.read_end();
  if (inner.empty()) json.fail("it holds no manifest");
  if (!secret) return manifest;
  check_signature(path, signature, signature_of(inner, *secret, pieces), pieces);
  for (const auto& shard : manifest.shards) {
    if (shard.sum.sha256.empty()) json.fail("it is signed, and has no SHA-256 of '" + shard.file + "'");
  }
  return manifest;
}

}  // namespace muster::checkpoint
