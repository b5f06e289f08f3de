#include <memory>

#include "cpp/cuda/emulated.h"

namespace muster::kernels::cuda {
namespace {

size_t size_in_bytes(DType dtype, size_t n) { return n * size_of(dtype); }

/// Gradients of the given sizes and dtypes, some missing, some not on 16 bytes, and the bucket they go to.
struct Bucket {
  std::vector<size_t> sizes;
  std::vector<PackSlot> slots;
  std::vector<Buffer<unsigned char>> gradients;
  std::vector<const void*> sources;
  std::vector<Chunk> chunks;
  size_t n = 0;

  Bucket(std::vector<size_t> counts, std::initializer_list<DType> dtypes, uint32_t seed)
      : sizes(std::move(counts)), chunks(chunks_of(sizes)) {
    Values values(seed, true);
    for (size_t i = 0; i < sizes.size(); ++i) {
      const DType dtype = dtypes.begin()[i % dtypes.size()];
      // Every fifth slot starts off a vector's boundary, every third gradient does.
      const size_t gap = i % 5 == 4 ? 1 : 0;
      n = (n + 15) / 16 * 16 + gap;
      slots.push_back({n, sizes[i], dtype});
      n += sizes[i];
      gradients.emplace_back(size_in_bytes(dtype, sizes[i]), i % 3 == 2 ? size_of(dtype) : 0);
      void* data = gradients.back().data();
      if (dtype == DType::f32) values.fill(static_cast<float*>(data), sizes[i]);
      if (dtype == DType::f64) values.fill(static_cast<double*>(data), sizes[i]);
      if (dtype == DType::bf16) values.fill(static_cast<BFloat16*>(data), sizes[i]);
      if (dtype == DType::f16) values.fill(static_cast<Half*>(data), sizes[i]);
      sources.push_back(i % 11 == 5 ? nullptr : data);
    }
  }

  PackPlan plan(DType bucket_dtype) const {
    return {slots.data(), static_cast<uint32_t>(slots.size()), chunks.data(), static_cast<uint32_t>(chunks.size()),
            bucket_dtype};
  }

  template <class T>
  void pack_on_cpu(Buffer<T>& bucket, bool accumulate, double factor) const {
    std::vector<PackItem> items;
    for (size_t i = 0; i < slots.size(); ++i) {
      items.push_back({sources[i], slots[i].source_dtype, bucket.data() + slots[i].offset, sizes[i]});
    }
    kernels::pack(items.data(), items.size(), accumulate, factor);
  }
};

template <class T>
void compare(const Bucket& bucket, DType dtype) {
  Buffer<T> expected(bucket.n), packed(bucket.n);
  Values(3, true).fill(expected);
  memcpy(packed.data(), expected.data(), bucket.n * sizeof(T));
  const struct {
    bool accumulate;
    double factor;
  } calls[] = {{false, 1}, {true, 0.3}, {true, 1}, {false, -3}};
  for (const auto& call : calls) {
    CAPTURE(call.accumulate, call.factor);
    bucket.pack_on_cpu(expected, call.accumulate, call.factor);
    check_ok(
        pack(bucket.plan(dtype), bucket.sources.data(), packed.data(), call.accumulate, call.factor, nullptr, nullptr));
    CHECK(first_difference(packed, expected) == -1);
  }
  CHECK(packed.is_intact());
}

TEST_CASE("pack equals the CPU's, for many tensors of many dtypes", "[cuda]") {
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    compare<float>(Bucket(odd_sizes(), {DType::f32}, 1), DType::f32);
    compare<float>(Bucket(odd_sizes(20), {DType::bf16, DType::f16, DType::f32}, 2), DType::f32);
    compare<double>(Bucket(odd_sizes(20), {DType::f64}, 4), DType::f64);
  }
}

TEST_CASE("pack rounds once into a bucket of bf16", "[cuda]") {
  const Bucket bucket(odd_sizes(20), {DType::f32, DType::bf16, DType::f16}, 5);
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    Buffer<float> wide(bucket.n);
    Buffer<BFloat16> expected(bucket.n), packed(bucket.n);
    for (const bool accumulate : {false, true}) {
      // The sum that is rounded: of the bucket as it is and the gradient.
      for (size_t i = 0; i < bucket.n; ++i) wide[i] = widen(packed[i]);
      bucket.pack_on_cpu(wide, accumulate, 0.3);
      for (size_t i = 0; i < bucket.n; ++i) expected[i] = narrow<BFloat16>(wide[i]);
      check_ok(pack(bucket.plan(DType::bf16), bucket.sources.data(), packed.data(), accumulate, 0.3, nullptr, nullptr));
      CHECK(first_difference(packed, expected) == -1);
    }
    CHECK(packed.is_intact());
  }
}

TEST_CASE("pack takes more tensors than one launch's parameters hold", "[cuda]") {
  const Bucket bucket(std::vector<size_t>(2 * kMaxPackSources + 5, 2), {DType::f32}, 6);
  Buffer<float> expected(bucket.n), packed(bucket.n);
  bucket.pack_on_cpu(expected, false, 1);
  check_ok(pack(bucket.plan(DType::f32), bucket.sources.data(), packed.data(), false, 1, nullptr, nullptr));
  CHECK(first_difference(packed, expected) == -1);
}

TEST_CASE("pack passes the parameters of few tensors, of many, or of as many as a launch holds", "[cuda]") {
  const struct {
    size_t tensors;
    size_t bytes;  // of pointers, and at most 128 of the rest
  } cases[] = {{1, 64 * 8},
               {2, 64 * 8},
               {63, 64 * 8},
               {64, 64 * 8},
               {65, 512 * 8},
               {511, 512 * 8},
               {512, 512 * 8},
               {513, kMaxPackSources * 8},
               {kMaxPackSources, kMaxPackSources * 8},
               {kMaxPackSources + 3, 64 * 8}};  // the last launch's
  for (const auto& one : cases) {
    CAPTURE(one.tensors);
    const Bucket bucket(std::vector<size_t>(one.tensors, 3), {DType::f32, DType::bf16}, 9);
    Buffer<float> expected(bucket.n), packed(bucket.n);
    bucket.pack_on_cpu(expected, false, 0.3);
    check_ok(pack(bucket.plan(DType::f32), bucket.sources.data(), packed.data(), false, 0.3, nullptr, nullptr));
    CHECK(first_difference(packed, expected) == -1);
    CHECK(packed.is_intact());
    CHECK(emulation::parameter_bytes > one.bytes);
    CHECK(emulation::parameter_bytes <= one.bytes + 128);
  }
}

TEST_CASE("pack multiplies by its gate, and takes every source for null where that is 0", "[cuda]") {
  Bucket bucket(odd_sizes(20), {DType::f32, DType::bf16, DType::f16}, 8);
  Bucket closed = bucket;
  for (const void*& source : closed.sources) source = nullptr;
  for (const uint32_t seed : kSeeds) {
    CAPTURE(seed);
    const Schedule schedule(seed);
    Buffer<float> expected(bucket.n), packed(bucket.n);
    Values(3).fill(expected);
    memcpy(packed.data(), expected.data(), bucket.n * sizeof(float));
    const struct {
      bool accumulate;
      double gate;
    } calls[] = {{true, 0}, {true, 1}, {true, 0.7}, {false, 0}, {false, 1}, {false, 1.3}, {false, 0}};
    for (const auto& call : calls) {
      CAPTURE(call.accumulate, call.gate);
      (call.gate == 0 ? closed : bucket).pack_on_cpu(expected, call.accumulate, 0.3 * call.gate);
      check_ok(pack(bucket.plan(DType::f32), bucket.sources.data(), packed.data(), call.accumulate, 0.3, &call.gate,
                    nullptr));
      CHECK(first_difference(packed, expected) == -1);
    }
    CHECK(packed.is_intact());
  }
}

TEST_CASE("pack refuses a bucket of integers", "[cuda]") {
  const Bucket bucket({4}, {DType::f32}, 7);
  Buffer<int32_t> packed(bucket.n);
  const Status status = pack(bucket.plan(DType::i32), bucket.sources.data(), packed.data(), false, 1, nullptr, nullptr);
  CHECK(status.code == Status::Code::invalid);
}

}  // namespace
}  // namespace muster::kernels::cuda
