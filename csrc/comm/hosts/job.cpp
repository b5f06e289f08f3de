#include "comm/hosts/job.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "device/kernel_dtype.h"

namespace muster::comm::hosts {

namespace {

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

at::Tensor memory_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }

void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

/// What jobs have in common.
class Striped : public Job {
 protected:
  explicit Striped(const Carrying& carrying) : carrying_(carrying) {}

  const HostsLayout& layout() const noexcept { return carrying_.layout; }
  bool carries() const noexcept { return carrying_.stripe >= 0; }
  bool is_here(int host) const noexcept { return host == carrying_.host; }
  int num_hosts() const noexcept { return layout().num_hosts(); }
  size_t ranks_here() const { return layout().ranks_of_host(carrying_.host).size(); }
  Stretch stripe_of(int64_t size) const {
    return carries() ? part_of({0, size}, carrying_.stripe, layout().num_stripes()) : Stretch{};
  }
  /// `bytes(host)` for each of the other hosts.
  template <class Bytes>
  Parcels parcels(const Bytes& bytes) const {
    std::vector<int64_t> sizes(static_cast<size_t>(num_hosts()), 0);
    for (int host = 0; carries() && host < num_hosts(); ++host) {
      if (!is_here(host)) sizes[static_cast<size_t>(host)] = bytes(host);
    }
    return {layout(), carrying_.stripe, sizes};
  }
  void copy_to_others(const Parcels& parcels, const void* from, int64_t bytes) const {
    for (int host = 0; host < num_hosts(); ++host) {
      if (!is_here(host)) copy_bytes(parcels.of_host(host), from, bytes);
    }
  }

  const Carrying carrying_;
};

// The hosts' carriers of a stripe divide it: each adds up one part, of what all hosts have summed, and sends the result
// to the others.
class Reduce final : public Striped {
 public:
  Reduce(const Carrying& carrying, at::Tensor values, kernels::Reduction reduction, const at::Tensor& into)
      : Striped(carrying),
        memory_(into.defined() ? into : values),
        values_(into.defined() ? std::move(values) : at::Tensor()),
        dtype_(kernel_dtype(memory_.scalar_type())),
        reduction_(reduction),
        size_(static_cast<int64_t>(memory_.element_size())) {
    const Stretch stripe = stripe_of(memory_.numel());
    for (int host = 0; host < num_hosts(); ++host) stretches_.push_back(part_of(stripe, host, num_hosts()));
    const auto bytes = [&](int from, int to) { return num_terms(from) * stretch(to).size() * size_; };
    received = parcels([&](int host) { return bytes(host, carrying_.host); });
    returned = parcels_at([&](int) { return own(); });
    returned_to_us = parcels_at([&](int host) { return stretch(host); });
    // What is sent has gone when the results come.
    sent = ranks_here() == 1 ? returned_to_us : parcels([&](int host) { return bytes(carrying_.host, host); });
  }

  at::Tensor memory() const override { return memory_; }
  void fill() override {
    if (values_.defined()) memory_.copy_(values_);
  }
  void read(void* const* data) override {
    if (!carries() || sent.is_in_place()) return;
    const auto& ranks = layout().ranks_of_host(carrying_.host);
    for (int host = 0; host < num_hosts(); ++host) {
      if (is_here(host)) continue;
      std::byte* term = sent.of_host(host);
      for (const auto& subtree : layout().subtrees(carrying_.host)) {
        std::vector<const void*> sources;
        for (size_t i = 0; i < ranks.size(); ++i) {
          if (ranks[i] < subtree.front() || ranks[i] > subtree.back()) continue;
          sources.push_back(place(data[i], stretch(host)));
        }
        add_up(sources, {term}, stretch(host).size());
        term += stretch(host).size() * size_;
      }
    }
  }
  bool has_return() const noexcept override { return true; }
  // Nobody else reads or writes this part of what this host's ranks have.
  void work(void* const* data) override {
    if (!carries()) return;
    std::vector<const void*> sources(static_cast<size_t>(layout().num_ranks()), nullptr);
    std::vector<void*> results;
    const auto& ranks = layout().ranks_of_host(carrying_.host);
    for (size_t i = 0; i < ranks.size(); ++i) {
      sources[static_cast<size_t>(ranks[i])] = place(data[i], own());
      results.push_back(place(data[i], own()));
    }
    for (int host = 0; host < num_hosts(); ++host) {
      if (is_here(host)) continue;
      const std::byte* term = received.of_host(host);
      for (const auto& subtree : layout().subtrees(host)) {
        sources[static_cast<size_t>(subtree.front())] = term;
        term += own().size() * size_;
      }
    }
    add_up(sources, results, own().size());
    if (!returned.is_in_place()) copy_to_others(returned, results.front(), own().size() * size_);
  }
  void write(void* const* data) override {
    const auto& ranks = layout().ranks_of_host(carrying_.host);
    for (int host = 0; carries() && host < num_hosts(); ++host) {
      for (size_t i = 0; !is_here(host) && i < ranks.size(); ++i) {
        if (ranks[i] == carrying_.rank && returned_to_us.is_in_place()) continue;
        copy_bytes(place(data[i], stretch(host)), returned_to_us.of_host(host), stretch(host).size() * size_);
      }
    }
  }
  void take() override {
    if (values_.defined()) values_.copy_(memory_);
  }

 private:
  const Stretch& stretch(int host) const { return stretches_.at(static_cast<size_t>(host)); }
  const Stretch& own() const { return stretch(carrying_.host); }
  int64_t num_terms(int host) const { return static_cast<int64_t>(layout().subtrees(host).size()); }
  std::byte* place(void* data, const Stretch& part) const { return static_cast<std::byte*>(data) + part.begin * size_; }
  // `part(host)` of the memory, in elements, for each of the other hosts.
  template <class Part>
  Parcels parcels_at(const Part& part) const {
    std::vector<Stretch> places(static_cast<size_t>(num_hosts()));
    for (int host = 0; carries() && host < num_hosts(); ++host) {
      const Stretch elements = is_here(host) ? Stretch{} : part(host);
      places[static_cast<size_t>(host)] = {elements.begin * size_, elements.end * size_};
    }
    return {layout(), carrying_.stripe, memory_.view(at::kByte), places};
  }
  void add_up(const std::vector<const void*>& sources, const std::vector<void*>& sums, int64_t count) const {
    if (count == 0) return;
    kernels::tree_reduce(dtype_, reduction_, sources.data(), static_cast<int>(sources.size()), sums.data(),
                         static_cast<int>(sums.size()), static_cast<size_t>(count));
  }

  const at::Tensor memory_;
  const at::Tensor values_;
  const kernels::DType dtype_;
  const kernels::Reduction reduction_;
  const int64_t size_;              // of an element
  std::vector<Stretch> stretches_;  // by the host whose carrier adds it up
};

class Broadcast final : public Striped {
 public:
  Broadcast(const Carrying& carrying, at::Tensor scratch, at::Tensor bytes, int source)
      : Striped(carrying),
        scratch_(std::move(scratch)),
        bytes_(std::move(bytes)),
        source_(source),
        from_(layout().host_of_worker(layout().worker_of(source))),
        stripe_(stripe_of(scratch_.numel())),
        own_(memory_of(stripe_.size())) {
    sent = parcels([&](int) { return is_here(from_) ? stripe_.size() : 0; });
    received = parcels([&](int host) { return host == from_ ? stripe_.size() : 0; });
  }

  at::Tensor memory() const override { return scratch_; }
  void fill() override {
    if (carrying_.rank == source_) scratch_.copy_(bytes_);
  }
  void read(void* const* data) override {
    if (!carries() || !is_here(from_)) return;
    const auto& ranks = layout().ranks_of_host(from_);
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i] == source_)
        copy_bytes(bytes_of(own_), static_cast<const std::byte*>(data[i]) + stripe_.begin, own_.numel());
    }
    copy_to_others(sent, bytes_of(own_), own_.numel());
  }
  void write(void* const* data) override {
    const std::byte* const came = carries() && !is_here(from_) ? received.of_host(from_) : bytes_of(own_);
    for (size_t i = 0; i < ranks_here(); ++i) {
      copy_bytes(static_cast<std::byte*>(data[i]) + stripe_.begin, came, stripe_.size());
    }
  }
  void take() override {
    if (carrying_.rank != source_) bytes_.copy_(scratch_);
  }

 private:
  const at::Tensor scratch_;
  const at::Tensor bytes_;
  const int source_;
  const int from_;  // the host
  const Stretch stripe_;
  const at::Tensor own_;
};

class Gather final : public Striped {
 public:
  Gather(const Carrying& carrying, at::Tensor scratch, at::Tensor bytes, std::vector<at::Tensor> outputs)
      : Striped(carrying),
        scratch_(std::move(scratch)),
        bytes_(std::move(bytes)),
        outputs_(std::move(outputs)),
        stripe_(stripe_of(bytes_.numel())),
        own_(memory_of(static_cast<int64_t>(ranks_here()) * stripe_.size())) {
    sent = parcels([&](int) { return own_.numel(); });
    received =
        parcels([&](int host) { return static_cast<int64_t>(layout().ranks_of_host(host).size()) * stripe_.size(); });
  }

  at::Tensor memory() const override { return scratch_; }
  void fill() override { scratch_.narrow(0, carrying_.rank * row(), row()).copy_(bytes_); }
  void read(void* const* data) override {
    const auto& ranks = layout().ranks_of_host(carrying_.host);
    for (size_t i = 0; i < ranks.size(); ++i) {
      copy_bytes(bytes_of(own_) + static_cast<int64_t>(i) * stripe_.size(), place(data[i], ranks[i]), stripe_.size());
    }
    copy_to_others(sent, bytes_of(own_), own_.numel());
  }
  void write(void* const* data) override {
    for (int host = 0; carries() && host < num_hosts(); ++host) {
      const std::byte* from = is_here(host) ? bytes_of(own_) : received.of_host(host);
      for (const int rank : layout().ranks_of_host(host)) {
        for (size_t i = 0; i < ranks_here(); ++i) copy_bytes(place(data[i], rank), from, stripe_.size());
        from += stripe_.size();
      }
    }
  }
  void take() override {
    for (size_t r = 0; r < outputs_.size(); ++r) {
      outputs_[r].copy_(scratch_.narrow(0, static_cast<int64_t>(r) * row(), row()));
    }
  }

 private:
  int64_t row() const { return bytes_.numel(); }
  std::byte* place(void* data, int rank) const { return static_cast<std::byte*>(data) + rank * row() + stripe_.begin; }

  const at::Tensor scratch_;
  const at::Tensor bytes_;
  const std::vector<at::Tensor> outputs_;
  const Stretch stripe_;
  const at::Tensor own_;  // of this host's ranks
};

}  // namespace

Parcels::Parcels(const HostsLayout& layout, int stripe, const std::vector<int64_t>& bytes, at::Tensor memory)
    : data_(std::move(memory)), sizes_(static_cast<size_t>(layout.num_workers()), 0), offsets_(bytes.size(), 0) {
  int64_t total = 0;
  for (int worker = 0; stripe >= 0 && worker < layout.num_workers(); ++worker) {
    if (layout.stripe_of(worker) != stripe) continue;
    const auto host = static_cast<size_t>(layout.host_of_worker(worker));
    offsets_[host] = total;
    sizes_[static_cast<size_t>(worker)] = bytes[host];
    total += bytes[host];
  }
  if (!data_.defined()) data_ = memory_of(total);
}

Parcels::Parcels(const HostsLayout& layout, int stripe, const at::Tensor& memory, const std::vector<Stretch>& places) {
  std::vector<int64_t> bytes;
  for (const auto& place : places) bytes.push_back(place.size());
  Stretch whole;
  for (int worker = 0; stripe >= 0 && worker < layout.num_workers(); ++worker) {
    if (layout.stripe_of(worker) != stripe) continue;
    const auto& place = places[static_cast<size_t>(layout.host_of_worker(worker))];
    if (place.size() == 0) continue;
    if (whole.size() > 0 && place.begin != whole.end) {
      *this = Parcels(layout, stripe, bytes);
      return;
    }
    whole = {whole.size() > 0 ? whole.begin : place.begin, place.end};
  }
  *this = Parcels(layout, stripe, bytes, memory.narrow(0, whole.begin, whole.size()));
  is_in_place_ = true;
}

std::byte* Parcels::of_host(int host) const { return bytes_of(data_) + offsets_.at(static_cast<size_t>(host)); }

std::unique_ptr<Job> reduce(const Carrying& carrying, const at::Tensor& values, kernels::Reduction reduction,
                            const at::Tensor& into) {
  return std::make_unique<Reduce>(carrying, values, reduction, into);
}

std::unique_ptr<Job> broadcast(const Carrying& carrying, const at::Tensor& scratch, const at::Tensor& bytes,
                               int source) {
  return std::make_unique<Broadcast>(carrying, scratch, bytes, source);
}

std::unique_ptr<Job> gather(const Carrying& carrying, const at::Tensor& scratch, const at::Tensor& bytes,
                            std::vector<at::Tensor> outputs) {
  return std::make_unique<Gather>(carrying, scratch, bytes, std::move(outputs));
}

}  // namespace muster::comm::hosts
