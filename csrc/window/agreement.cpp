#include "window/agreement.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iomanip>
#include <set>
#include <type_traits>
#include <utility>

#include "comm/text_exchange.h"
#include "core/flat_layout.h"
#include "core/lines.h"
#include "core/plain_text.h"
#include "muster/error.h"

namespace muster {

namespace {

constexpr int kDigestBits = 52;

class Hash {
 public:
  void add(uint64_t word) noexcept {
    state_ = (state_ ^ word) * 0x9E3779B97F4A7C15ULL;
    state_ ^= state_ >> 32;
  }
  void add(double value) noexcept { add(std::bit_cast<uint64_t>(value)); }
  void add(const std::byte* bytes, size_t size) noexcept {
    for (; size > 0;) {
      uint64_t word = 0;
      const size_t taken = std::min(size, sizeof word);
      std::memcpy(&word, bytes, taken);
      add(word);
      bytes += taken;
      size -= taken;
    }
  }
  uint64_t value() const noexcept { return state_; }

 private:
  uint64_t state_ = 0x6D7573746572ULL;
};

void add_values(const at::Tensor& tensor, Hash& hash) {
  if (!tensor.defined()) return hash.add(uint64_t{0});
  const auto values = tensor.detach().cpu().contiguous();
  hash.add(static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes());
}

// Calls function(name, value) for every hyperparameter.
template <class F>
void for_each_value(const kernels::AdamGroup& g, const F& function) {
  function("lr", g.lr);
  function("beta1", g.beta1);
  function("beta2", g.beta2);
  function("eps", g.eps);
  function("weight_decay", g.weight_decay);
  function("decoupled_weight_decay", g.decoupled ? 1.0 : 0.0);
  function("amsgrad", g.amsgrad ? 1.0 : 0.0);
  function("maximize", g.maximize ? 1.0 : 0.0);
}

template <class F>
void for_each_value(const kernels::SgdGroup& g, const F& function) {
  function("lr", g.lr);
  function("momentum", g.momentum);
  function("dampening", g.dampening);
  function("weight_decay", g.weight_decay);
  function("nesterov", g.nesterov ? 1.0 : 0.0);
  function("maximize", g.maximize ? 1.0 : 0.0);
}

template <class F>
void for_each_value(const kernels::AdagradGroup& g, const F& function) {
  function("lr", g.lr);
  function("lr_decay", g.lr_decay);
  function("eps", g.eps);
  function("weight_decay", g.weight_decay);
  function("maximize", g.maximize ? 1.0 : 0.0);
}

// Calls function(group, name, value).
template <class F>
void for_each_hyperparameter(const FlatGroups& groups, const F& function) {
  std::visit(
      [&](const auto& list) {
        for (size_t group = 0; group < list.size(); ++group)
          for_each_value(list[group], [&](const char* name, double value) { function(group, name, value); });
      },
      groups);
}

}  // namespace

Agreement::Agreement(const ParameterRegistry& registry, std::vector<OptimizerStep> steps,
                     const kernels::LossScaleState& scale, const std::vector<int>& written, bool shares_state)
    : registry_(&registry), steps_(std::move(steps)), scale_(scale), shares_state_(shares_state) {
  for (const int p : written) written_.push_back({-1, p});
  look_at_steps();
}

OptimizerState::Standing Agreement::standing(const OptimizerStep& step, size_t p) const {
  auto standing = step.flat->state().standing(p);
  standing.has_own_state = standing.has_own_state && shares_state_;
  return standing;
}

bool Agreement::is_in_doubt(const OptimizerStep& step, size_t p, const OptimizerState::Standing& standing) const {
  if (shares_state_ || step.flat->shard().size > 1) return standing.has_own_state;
  return step.flat->state().entry(p).was_given;
}

void Agreement::note_agreed() const noexcept {
  for (const auto& place : written_) {
    if (place.optimizer < 0) continue;
    steps_[static_cast<size_t>(place.optimizer)].flat->state().entry(static_cast<size_t>(place.parameter)).was_given =
        false;
  }
}

// For the digest, and for state that only this worker knows. Of thousands of parameters in every window.
void Agreement::look_at_steps() {
  if (steps_.empty()) return;
  Hash hash;
  hash.add(static_cast<double>(scale_.scale));
  hash.add(static_cast<uint64_t>(scale_.growth_tracker));
  for (size_t s = 0; s < steps_.size(); ++s) {
    const auto& step = steps_[s];
    for (const auto& line : step.hyperparameters) hash.add(stable_hash(line));
    hash.add(static_cast<uint64_t>(step.groups.index()));
    for_each_hyperparameter(step.groups, [&](size_t, const char*, double value) { hash.add(value); });
    for (size_t p = 0; p < step.parameters.size(); ++p) {
      const auto standing = this->standing(step, p);
      hash.add((static_cast<uint64_t>(step.parameters[p]) << 32) ^ (static_cast<uint64_t>(step.flat->group(p)) << 2) ^
               (standing.has_own_state ? 2U : 0U) ^ (standing.started ? 1U : 0U));
      hash.add(static_cast<double>(standing.steps));
      if (is_in_doubt(step, p, standing)) written_.push_back({static_cast<int>(s), static_cast<int>(p)});
    }
  }
  digest_ = static_cast<double>(hash.value() >> (64 - kDigestBits));
}

std::string Agreement::describe() const {
  TextWriter out;
  out << std::setprecision(17);
  out << "loss scale " << scale_.scale << " after " << scale_.growth_tracker << " finite steps\n";
  for (size_t s = 0; s < steps_.size(); ++s) {
    const auto& step = steps_[s];
    const auto whose = steps_.size() == 1 ? std::string() : " of optimizer " + std::to_string(s);
    for (const auto& line : step.hyperparameters) out << line << whose << '\n';
    for_each_hyperparameter(step.groups, [&](size_t group, const char* name, double value) {
      out << name << ' ' << value << " in group " << group << whose << '\n';
    });
    for (size_t p = 0; p < step.parameters.size(); ++p) {
      const auto standing = this->standing(step, p);
      out << "parameter '" << registry_->name(static_cast<size_t>(step.parameters[p])) << "' in group "
          << step.flat->group(p) << whose << " after " << standing.steps << " steps"
          << (standing.has_own_state ? " with state that was loaded" : "")
          << (standing.started ? "" : ", before its first step") << '\n';
    }
  }
  return out.str();
}

void Agreement::throw_difference(comm::Communicator& workers) const {
  const auto texts = exchange_texts(workers, describe());
  for (size_t r = 1; r < texts.size(); ++r) {
    const auto difference = first_difference(texts.front(), texts[r]);
    if (!difference) continue;
    throw LayoutMismatch("the ranks would make different steps: rank 0 has " + difference->first + ", rank " +
                         std::to_string(r) + " has " + difference->second +
                         ". Nothing was changed and the window is dropped; let every rank's optimizer have the same: "
                         "feed schedules with what strategy.reduce() gives, and load state on all ranks");
  }
  throw LayoutMismatch(
      "the ranks would make different steps, which differ in less than can be printed; let every rank's optimizer have "
      "the same hyperparameters and state");
}

std::vector<int> Agreement::compare_values(comm::Communicator& workers) const {
  TextWriter mine;
  for (const auto& place : written_) mine << place.optimizer << ' ' << place.parameter << '\n';
  std::set<Place> all;
  const auto lists = exchange_texts(workers, mine.str());
  for (const auto& list : lists) {
    TextReader in(list);
    for (Place place; in >> place.optimizer >> place.parameter;) all.insert(place);
  }
  TextWriter hashes;
  for (const auto& place : all) hashes << hash_of(place) << '\n';
  const auto texts = exchange_texts(workers, hashes.str());
  const auto chiefs = lines_of(texts.front());
  for (size_t r = 1; r < texts.size(); ++r) {
    const auto others = lines_of(texts[r]);
    size_t line = 0;
    for (const auto& place : all) {
      if (others.at(line) == chiefs.at(line)) {
        ++line;
        continue;
      }
      std::string who;
      const auto key = std::to_string(place.optimizer) + ' ' + std::to_string(place.parameter);
      for (size_t w = 0; w < lists.size(); ++w) {
        const auto keys = lines_of(lists[w]);
        if (std::find(keys.begin(), keys.end(), key) != keys.end())
          who += (who.empty() ? "rank " : ", rank ") + std::to_string(w);
      }
      throw LayoutMismatch(name_of(place) + " was written since the last step, by " + who + ", and rank 0 and rank " +
                           std::to_string(r) +
                           " have different values of it. Nothing was changed and the window is dropped; make the same "
                           "change on every rank (a load_state_dict(), say), or strategy.broadcast() it");
    }
  }
  std::vector<int> parameters;
  for (const auto& place : all) {
    if (place.optimizer < 0) parameters.push_back(place.parameter);
  }
  return parameters;
}

std::string Agreement::name_of(const Place& place) const {
  if (place.optimizer < 0) return "parameter '" + registry_->name(static_cast<size_t>(place.parameter)) + "'";
  const auto& parameters = steps_[static_cast<size_t>(place.optimizer)].parameters;
  const auto index = parameters[static_cast<size_t>(place.parameter)];
  return "the optimizer's state of parameter '" + registry_->name(static_cast<size_t>(index)) + "'";
}

uint64_t Agreement::hash_of(const Place& place) const {
  Hash hash;
  const auto parameter = static_cast<size_t>(place.parameter);
  if (place.optimizer < 0) {
    add_values(registry_->parameter(0, parameter), hash);
    return hash.value();
  }
  const auto& state = steps_[static_cast<size_t>(place.optimizer)].flat->state();
  const auto& entry = state.entry(parameter);
  for (size_t which = 0; which <= StateEntry::kMaster; ++which) add_values(entry.current(which), hash);
  hash.add(static_cast<double>(state.relevant_steps(entry.step.item<float>())));
  return hash.value();
}

}  // namespace muster
