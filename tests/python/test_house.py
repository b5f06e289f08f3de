"""tools/house.py: what it counts, and that it can fail."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import house

CODE = b"""
class Contract {
 public:
  virtual ~Contract() = default;
  Contract(const Contract&) = delete;
  Contract& operator=(const Contract&) = delete;
  virtual int rank() const noexcept = 0;
  virtual at::Tensor allocate(int64_t numel, std::vector<int> sizes = {}) = 0;
  int size() const { return place_.size; }
  template <class T>
  void each(const T& function);
  using Work = int;
  static constexpr int kMost = 3;

 protected:
  void helper();

 private:
  struct Place {
    int rank = 0;
    int size = 1;
  };
  Place place_;
  std::function<void(int)> call_;
  int first_, second_;
  static int shared_;
  void (*release_)(void*) = nullptr;
};
"""


def counts() -> dict[str, house.ClassCount]:
    return {count.name: count for count in house.classes_in(CODE, "a.h")}


def test_functions_and_members_of_a_class_are_counted() -> None:
    contract = counts()["Contract"]
    assert contract.public_functions == ["rank", "allocate", "size", "each"]
    assert contract.members == ["place_", "call_", "first_", "second_", "release_"]
    assert contract.virtuals == ["rank", "allocate"]
    assert contract.is_abstract


def test_a_nested_class_counts_for_itself() -> None:
    assert counts()["Place"].members == ["rank", "size"]


def test_each_bound_can_fail() -> None:
    count = house.ClassCount("Crowd", "a.h", ["f"] * 26, ["v"] * 10, ["m"] * 21, is_abstract=True)
    assert len(list(house.check_classes([count]))) == 3
    fits = house.ClassCount("Fits", "a.h", ["f"] * 25, ["v"] * 9, ["m"] * 20, is_abstract=True)
    assert list(house.check_classes([fits])) == []


def test_every_class_of_the_product_is_seen() -> None:
    found = {count.name for count in house.all_classes()}
    assert {"Communicator", "Strategy", "FlatLayout", "Quorum"} <= found


def test_modules_list_what_others_import_and_nothing_else() -> None:
    sources = {
        "p.a": "__all__ = ['listed', 'unused', 'reached', 'tested']",
        "p.b": "from p import a, face\nfrom p.a import _own, listed, unlisted\na.reached()\na.hidden()\nface.inner()",
        "p.face": "__all__ = ['for_users']",
        "p.free": "from p.b import anything",
    }
    product = {name: ast.parse(source) for name, source in sources.items()}
    tests = [ast.parse("import p.a\np.a.tested()")]
    assert sorted(house.check_exports(product, tests, ["p.face"])) == [
        "p.a lists unused in __all__, and nobody takes it: leave it out",
        "p.b takes hidden from p.a, whose __all__ lacks it: list it there",
        "p.b takes unlisted from p.a, whose __all__ lacks it: list it there",
    ]


HIDDEN = b"""
namespace muster {
namespace comm {
namespace {

constexpr int kMost = 3;
struct Place {
  int rank = 0;
};
struct Known;
using Clock = int;
template <class T>
bool is_plain(const T& a, int* b = nullptr);
std::string* find(const at::Tensor& tensor) { return nullptr; }
int Place::size() { return kMost; }

}  // namespace
int shown();
}  // namespace comm
}  // namespace muster
"""


def test_what_anonymous_namespaces_hide_is_found() -> None:
    assert set(house.hidden_names(HIDDEN)) == {
        ("::muster::comm", "kMost"),
        ("::muster::comm", "Place"),
        ("::muster::comm", "is_plain(T&, int*)"),
        ("::muster::comm", "find(at::Tensor&)"),
    }


def test_two_files_that_hide_the_same_clash() -> None:
    overload = b"namespace muster::comm { namespace { std::string* find(int a) { return nullptr; } } }"
    assert list(house.check_hidden_names({"a.cpp": HIDDEN, "b.cpp": overload})) == []
    same = b"namespace muster { namespace comm { namespace { bool find(const at::Tensor& other); } } }"
    (message,) = house.check_hidden_names({"a.cpp": HIDDEN, "b.cpp": same})
    assert message.startswith("a.cpp and b.cpp both hide find(at::Tensor&) in muster::comm")
