// A checkpoint that parameter servers write, as the chief sees it while it makes the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "embedding/table_contents.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"

namespace muster {

/// Stand-ins for tensors that servers write: of their dtypes and sizes, on the meta device, without values. Parameters
/// and tables are numbered as in the plan. Owned by one thread.
class ServerCut {
 public:
  /// `answers`: to `request`, by server. Throws CheckpointError where they contradict each other: a parameter may be
  /// stepped for the first time meanwhile, where steps are not made together. Where a server refuses there is
  /// refusal() alone.
  ServerCut(const server::Plan& plan, const server::WritePart& request, const std::vector<server::WritesPart>& answers);

  /// Why there will be no parts, naming a server; empty where there will.
  const std::string& refusal() const noexcept { return refusal_; }

  /// Whose parts there will be.
  std::vector<std::string> writers() const;

  /// Whether the chief writes the parameter itself.
  bool is_left(size_t parameter) const;
  /// What stands for a part of a parameter that is not left (Part::steps: the count, 0-dim fp32); undefined where there
  /// is none.
  at::Tensor part(size_t parameter, server::Part part) const;
  bool has_table(size_t table) const { return tables_.contains(static_cast<uint32_t>(table)); }
  /// What stands for the rows of a table that servers write, and their values and states.
  TableContents contents(size_t table) const;

  /// What servers call the tensor that this one, or the narrowed one of states, stands for; nothing for others.
  std::optional<std::string> name_of(const at::Tensor& tensor) const;

 private:
  struct Known {
    std::map<server::Part, at::Tensor> parts;
    double steps = 0;
  };
  struct Named {
    std::string name;
    const server::TableSpec* states_of = nullptr;  // not null: the states of its rows, one kind beside the other
  };

  at::Tensor stand_in(at::IntArrayRef sizes, at::ScalarType dtype, Named named);
  void add_parameter(const ParameterSpec& spec, const server::PartOfParameter& part);
  void add_tables(const std::vector<server::WritesPart>& answers);

  const server::Plan& plan_;
  const server::WritePart request_;
  std::string refusal_;
  std::map<uint32_t, Known> parameters_;
  std::map<uint32_t, TableContents> tables_;
  std::map<const void*, Named> names_;  // by the stand-in's storage
};

/// Whether a slot of these strides has the elements in row-major order, one behind the other.
bool is_row_major(at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace muster
