// The sets of parameters of a strategy: those that are stepped together, and the one that servers hold.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "strategy/session.h"
#include "window/parameter_set.h"

namespace muster {

/// Owned by the thread that prepares and steps. Sets are numbered from 0 on.
class ParameterSets {
 public:
  explicit ParameterSets(Session& session) : session_(session) {}

  /// The set of exactly these parameters (registry indices, any order). Throws InvalidArgument if it shares parameters
  /// with another set without being equal to it, unless `may_share`: such sets step in turns, between which no window
  /// of theirs is open.
  int set_of(std::vector<int> parameters, bool may_share = false);
  /// The parameters of a set changed (add_param_group): takes effect at its next window.
  void change_set(int set, std::vector<int> parameters);

  ParameterSet& at(int set) const { return *sets_.at(static_cast<size_t>(set)); }
  /// The numbers of the sets whose window is open.
  std::vector<int> open() const;
  /// Registry indices of the parameters in no set.
  const std::vector<size_t>& outsiders();
  /// Those of them that were written and that workers are to compare in the window that begins: what is written before
  /// every window (an average of the others, say) and was alike, in the 1st, 2nd, 4th, 8th, ... of these windows.
  std::vector<size_t> outsiders_to_compare();

  /// The set, whose gradients are kept from here on, and those of other sets dropped.
  ParameterSet& begin_step(int set);

  /// Whether the set's parameters live on servers that connect_servers() is to connect.
  bool awaits_servers(int set) const;
  /// See ParameterSet::connect_servers. Throws InvalidArgument for a second set: servers hold one.
  void connect_servers(int set, FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups);
  /// Whether servers hold parameters and their state.
  bool has_servers() const noexcept { return served() != nullptr; }
  /// Throws InvalidArgument without has_servers().
  ServerExchange& servers() const;
  /// Takes in what servers have of a set whose window is not open. No-op without has_servers().
  void refresh();
  /// By part, the state of the parameters of the registry, from the servers that hold it; undefined where there is
  /// none. Without has_servers(), of no parameters. `to_stay`: not of rows that workers have no memory for. Tables
  /// travel once for all parts of a call.
  std::vector<std::vector<at::Tensor>> state_on_servers(const std::vector<int>& parameters,
                                                        std::span<const server::Part> parts, bool to_stay) const;

  /// See ServerExchange::stand_in; of a parameter of the registry.
  at::Tensor stand_in(int parameter) const;

  /// Of an embedding's weight of the registry whose rows servers alone have, or will have: what they keep, or will
  /// begin with.
  TableContents table_contents(int parameter) const;

  /// See ParameterSet::leave_memory; what it throws is logged.
  void leave_memory() noexcept;
  /// Ends all sets, when no replica runs. Rows that servers hold come back before.
  void end();

 private:
  ParameterSet* served() const noexcept;

  Session& session_;
  std::vector<std::unique_ptr<ParameterSet>> sets_;
  std::vector<size_t> outsiders_;  // among the first `num_looked_at_` of the registry
  size_t num_looked_at_ = 0;       // 0: sets have changed since
  /// How often an outsider was found written, and the count from which on it is compared.
  struct Pace {
    int64_t found = 0;
    int64_t due = 1;
    uint64_t times_agreed = 0;
  };
  std::unordered_map<size_t, Pace> paces_;
};

}  // namespace muster
