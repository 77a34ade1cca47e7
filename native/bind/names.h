// What Python calls the values of the core's enumerations.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "kvsieve/layer.h"

namespace kvsieve::bind {

// The value of an enumeration that Python calls `name`.
template <class Value>
Value named(const char* what, const std::string& name,
            std::initializer_list<std::pair<const char*, Value>> values) {
  for (const auto& [known, value] : values)
    if (name == known) return value;
  throw std::invalid_argument(std::string("unknown ") + what + ": " + name);
}

inline SourceFormat source_format(const std::string& name) {
  using enum SourceFormat;
  return named<SourceFormat>("source format", name,
                             {{"f32", f32}, {"q4_0", q4_0}, {"q4_1", q4_1}, {"q8_0", q8_0}});
}

inline WeightKind weight_kind(const std::string& name) {
  using enum WeightKind;
  return named<WeightKind>("weight kind", name, {{"f32", f32}, {"q4", q4}, {"q8", q8}});
}

inline CacheType cache_type(const std::string& name) {
  using enum CacheType;
  return named<CacheType>("cache type", name,
                          {{"f32", f32}, {"f16", f16}, {"q8_0", q8}, {"q4_0", q4}});
}

inline Selector selector(const std::string& name) {
  using enum Selector;
  return named<Selector>("selector", name,
                         {{"probe", probe},
                          {"even", even},
                          {"anchors", anchors},
                          {"window", window},
                          {"minmax", minmax},
                          {"mean", mean},
                          {"meanstd", meanstd},
                          {"oracle", oracle},
                          {"random", random}});
}

inline VectorRule vector_rule(const std::string& name) {
  using enum VectorRule;
  return named<VectorRule>(
      "rule", name, {{"none", none}, {"minmax", minmax}, {"mean", mean}, {"meanstd", meanstd}});
}

}  // namespace kvsieve::bind
