#include <algorithm>
#include <cmath>
#include <set>

#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

constexpr size_t kChunkBytes = kTile * kCopyUnit;

/// Tensors of so many bytes, or their copies, some not on a unit's boundary.
struct Tensors {
  std::vector<Buffer<unsigned char>> values;
  std::vector<std::vector<uint64_t>> digests;
  std::vector<CopySegment> segments;
  std::vector<Chunk> chunks;

  Tensors(const std::vector<size_t>& sizes, size_t odd, Tensors* source = nullptr) {
    std::mt19937 random(3);
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t units = (sizes[i] + kCopyUnit - 1) / kCopyUnit;
      auto& own = values.emplace_back(sizes[i], i % 4 == odd ? 2 : 0);
      for (auto& byte : own) byte = static_cast<unsigned char>(random());
      digests.emplace_back(num_tiles(units));
      segments.push_back({own.data(), units, sizes[i], digests.back().data(), nullptr, nullptr});
      if (source != nullptr) segments.back().source = source->values[i].data();
      if (source != nullptr) segments.back().source_digests = source->digests[i].data();
      for (uint32_t c = 0; c < num_tiles(units); ++c) chunks.push_back({static_cast<uint32_t>(i), c});
    }
  }

  void digest() {
    check_ok(digest_copies(segments.data(), chunks.data(), static_cast<uint32_t>(chunks.size()), nullptr));
  }
  void mend() { check_ok(mend_copies(segments.data(), chunks.data(), static_cast<uint32_t>(chunks.size()), nullptr)); }
};

const std::vector<size_t> kSizes = {1, 2, 15, 16, 17, 8, 4096, kChunkBytes, kChunkBytes + 2, 2 * kChunkBytes - 6};

/// Tensors and a copy that is equal to them.
struct Pair {
  Tensors tensors{kSizes, 1};
  Tensors copies{kSizes, 2, &tensors};

  void follow() {
    tensors.digest();
    copies.digest();
    copies.mend();
  }

  void check_equal() const {
    for (size_t i = 0; i < kSizes.size(); ++i) {
      CAPTURE(i, kSizes[i]);
      CHECK(memcmp(copies.values[i].data(), tensors.values[i].data(), kSizes[i]) == 0);
      CHECK((copies.values[i].is_intact() && tensors.values[i].is_intact()));
    }
  }
};

TEST_CASE("copies follow what was written of tensors, and what was written of them is mended", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    Pair pair;
    pair.tensors.digest();
    pair.copies.digest();
    CHECK(pair.tensors.digests == pair.copies.digests);
    for (auto& of : pair.tensors.values) of[of.size() - 1] ^= 1;  // the last byte alone
    pair.follow();
    pair.check_equal();
    for (auto& of : pair.copies.values) of[0] ^= 0x80;
    pair.follow();
    pair.check_equal();
  }
}

TEST_CASE("a chunk that has its source's digest is left alone", "[cuda]") {
  const Schedule schedule(0);
  Pair pair;
  pair.follow();
  // Behind the digests, which an ordered program does not do.
  auto& last = pair.copies.values.back();
  last[0] ^= 1;
  const auto before = last[0];
  pair.copies.mend();
  CHECK(last[0] == before);
  pair.tensors.values.back()[kChunkBytes] ^= 1;  // of its other chunk
  pair.tensors.digest();
  pair.copies.mend();
  CHECK(last[0] == before);
  CHECK(last[kChunkBytes] == pair.tensors.values.back()[kChunkBytes]);
}

TEST_CASE("digests tell writes of many elements by a pattern", "[cuda]") {
  const Schedule schedule(0);
  Tensors tensors({kChunkBytes}, 1);
  auto* const floats = reinterpret_cast<float*>(tensors.values[0].data());
  constexpr size_t kFloats = kChunkBytes / sizeof(float);
  const std::vector<float> values = [&] {
    std::vector<float> list(kFloats);
    for (size_t i = 0; i < kFloats; ++i) list[i] = std::sin(static_cast<float>(i));
    return list;
  }();
  std::set<uint64_t> digests;
  size_t patterns = 0;
  const auto note = [&](const auto& write) {
    memcpy(floats, values.data(), kChunkBytes);
    write();
    tensors.digest();
    digests.insert(tensors.digests[0][0]);
    ++patterns;
  };
  note([] {});
  note([&] { std::for_each(floats, floats + kFloats, [](float& v) { v = -v; }); });
  note([&] { std::for_each(floats, floats + kFloats, [](float& v) { v = std::min(v, 0.5F); }); });
  note([&] { std::fill(floats, floats + kFloats, 0.F); });
  note([&] { std::reverse(floats, floats + kFloats); });
  note([&] { std::rotate(floats, floats + 4, floats + kFloats); });
  // Signs alone: of neighbours, of the same lane's, of two threads'.
  for (const size_t distance : {1, 2, 4, 1024, 1028}) {
    for (size_t first = 0; first < 64; ++first) {
      note([&] { floats[first] = -floats[first], floats[first + distance] = -floats[first + distance]; });
      note([&] { std::swap(floats[first], floats[first + distance]); });
    }
  }
  CHECK(digests.size() == patterns);
}

}  // namespace
}  // namespace muster::kernels::cuda
