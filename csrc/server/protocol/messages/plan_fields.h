// The bytes of types of other rooms that messages carry: a plan, its optimizer's groups, a step's scalars, its norm.
#pragma once

#include <cstdint>
#include <type_traits>
#include <variant>

#include "core/flat_layout.h"
#include "embedding/row_initialiser.h"
#include "kernels/kernels.h"
#include "kernels/norm_sum.h"
#include "optimizer/flat_groups.h"
#include "server/protocol/messages/bounds.h"
#include "server/protocol/plan.h"
#include "server/protocol/wire.h"

namespace muster::server {

template <>
struct LastOf<c10::ScalarType> {
  static constexpr auto kValue = c10::ScalarType::Undefined;
};

template <>
struct LastOf<RowPlacement> {
  static constexpr auto kValue = RowPlacement::range;
};

template <>
struct LastOf<RowInitialiser::Kind> {
  static constexpr auto kValue = RowInitialiser::Kind::uniform;
};

template <>
struct FieldsOf<kernels::AdamGroup> {
  using G = kernels::AdamGroup;
  static constexpr auto kFields =
      fields(&G::lr, &G::beta1, &G::beta2, &G::eps, &G::weight_decay, &G::decoupled, &G::amsgrad, &G::maximize);
};

template <>
struct FieldsOf<kernels::SgdGroup> {
  using G = kernels::SgdGroup;
  static constexpr auto kFields =
      fields(&G::lr, &G::momentum, &G::dampening, &G::weight_decay, &G::nesterov, &G::maximize);
};

template <>
struct FieldsOf<kernels::AdagradGroup> {
  using G = kernels::AdagradGroup;
  static constexpr auto kFields = fields(&G::lr, &G::lr_decay, &G::eps, &G::weight_decay, &G::maximize);
};

template <>
struct FieldsOf<kernels::StepScalars> {
  using S = kernels::StepScalars;
  static constexpr auto kFields =
      fields(&S::divisor, &S::clip, &S::norm, &S::unit, &S::finite, &S::dropped, &S::clip_value);
};

/// A number that is refused where it is not what `is_valid` says.
template <class T, class M, class F>
constexpr auto checked(T M::* member, F is_valid, const char* what) {
  return field(member, [is_valid, what](auto& value, auto& wire) {
    visit_value(value, wire);
    WireReader::check(is_valid(value), what);
  });
}

template <>
struct FieldsOf<kernels::NormSum> {
  using N = kernels::NormSum;
  struct DigitsField {
    template <class M, class W>
    void operator()(M& digits, W& wire) const {
      for (auto& digit : digits) {
        wire.number(digit);
        WireReader::check(digit <= kMaxNormDigit, "a norm of more partials than there can be");
      }
    }
  };
  static constexpr bool is_bin(int32_t top) { return top >= N::kLowest && top <= kMaxNormTop; }
  static constexpr bool is_partial(double special) { return !(special < 0); }
  static constexpr auto kFields =
      fields(field(&N::digits, DigitsField()), checked(&N::top, is_bin, "a norm in a bin that there is not"),
             checked(&N::special, is_partial, "a norm below 0"));
};

/// The optimizer's kind, and its groups.
struct GroupsField {
  template <class M, class W>
  void operator()(M& groups, W& wire) const {
    auto kind = static_cast<uint8_t>(groups.index());
    wire.number(kind);
    if constexpr (!std::is_const_v<M>) {
      WireReader::check(kind < std::variant_size_v<FlatGroups>, "an unknown optimizer");
      if (kind == 0) groups.template emplace<0>();
      if (kind == 1) groups.template emplace<1>();
      if (kind == 2) groups.template emplace<2>();
    }
    std::visit([&](auto& list) { visit_value(list, wire, kMaxGroups); }, groups);
  }
};

template <>
struct FieldsOf<ParameterSpec> {
  using P = ParameterSpec;
  static constexpr auto kFields =
      fields(bounded(&P::name, kMaxNameBytes), &P::dtype, bounded(&P::sizes, kMaxDims), bounded(&P::strides, kMaxDims));
};

template <>
struct FieldsOf<RowInitialiser> {
  using I = RowInitialiser;
  static constexpr auto kFields = fields(&I::kind, &I::scale, &I::seed);
};

template <>
struct FieldsOf<TableSpec> {
  using T = TableSpec;
  static constexpr auto kFields = fields(bounded(&T::name, kMaxNameBytes), &T::num_rows, &T::dim, &T::placement,
                                         &T::initialiser, &T::group, &T::row_wise_adagrad);
};

/// Snapshots begin with it: python/muster/checkpoint/servers.py reads it there, too.
template <>
struct FieldsOf<Plan> {
  using P = Plan;
  static constexpr auto kFields =
      fields(bounded(&P::parameters, kMaxParameters), bounded(&P::group_of, kMaxParameters),
             bounded(&P::tables, kMaxTables), field(&P::groups, GroupsField()), &P::servers, &P::workers, &P::staleness,
             &P::chunk_bytes, &P::heartbeat_ms, &P::timeout_ms, &P::norm_type);
};

}  // namespace muster::server
