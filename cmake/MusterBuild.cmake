# How every target of this project is compiled. Not installed.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT MUSTER_SANITIZE MATCHES "^(address|thread)?$")
  message(FATAL_ERROR "MUSTER_SANITIZE is '${MUSTER_SANITIZE}'; give address, thread or nothing.")
endif()

# The sloppiness is what ccache documents for precompiled headers.
find_program(MUSTER_CCACHE ccache)
if(MUSTER_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
    "CCACHE_BASEDIR=${CMAKE_CURRENT_SOURCE_DIR}" "${MUSTER_CCACHE}")
endif()

# Bit equality: no contraction of a * b + c, on any target and instruction set.
function(muster_build_options target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_compile_options(${target} PRIVATE -ffp-contract=off -fno-math-errno -Wall -Wextra)
  if(MUSTER_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # False alarms inside std::string (gcc bugs 105651 and 105329).
    target_compile_options(${target} PRIVATE -Wno-restrict -Wno-stringop-overflow)
  endif()
  if(MUSTER_CCACHE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
  if(MUSTER_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${MUSTER_SANITIZE} -fno-omit-frame-pointer -g1)
    target_link_options(${target} PRIVATE -fsanitize=${MUSTER_SANITIZE})
    # False alarms inside std::regex and std::string under the address sanitizer (gcc bugs 105562 and 105329), and a
    # fence in torch's headers that gcc's thread sanitizer does not follow.
    target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized -Wno-array-bounds -Wno-restrict
      $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  endif()
endfunction()

function(muster_precompile target)
  target_precompile_headers(${target} PRIVATE ${ARGN})
endfunction()

# Gives neighbouring files to the compiler as one, which reads torch's headers once. Names in anonymous namespaces
# therefore differ: of the library and its bindings all, of tests those of a folder.
#
# By default groups are of one folder, and small enough that after a change to one file its group compiles in seconds.
# All together compile in a third of the time in a few groups, two for each processor, and tests in one a folder.
set(MUSTER_UNITY_FILES 8 CACHE STRING "Source files of a folder that are compiled as one, at most; 0: each by itself")
set(MUSTER_UNITY_GROUPS 0 CACHE STRING "Groups that the library is compiled in, whatever the folders; 0: by MUSTER_UNITY_FILES")

# muster_unite(TARGET [GROUPS]): by folder where GROUPS is 0 or not given.
function(muster_unite target)
  if(MUSTER_UNITY_FILES EQUAL 0)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  if(ARGV1)
    set(bytes_of_all 0)
    foreach(source ${sources})
      file(SIZE "${source}" bytes)
      set(bytes_before_${source} ${bytes_of_all})
      math(EXPR bytes_of_all "${bytes_of_all} + ${bytes}")
    endforeach()
    foreach(source ${sources})
      math(EXPR group "${bytes_before_${source}} * ${ARGV1} / ${bytes_of_all}")
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP of_all_${group})
    endforeach()
    return()
  endif()
  foreach(source ${sources})
    file(RELATIVE_PATH folder "${CMAKE_CURRENT_SOURCE_DIR}" "${source}")
    cmake_path(GET folder PARENT_PATH folder)
    string(REPLACE "/" "_" folder "${folder}")
    set(group 0)
    if(NOT MUSTER_UNITY_GROUPS)
      math(EXPR group "0${count_${folder}} / ${MUSTER_UNITY_FILES}")
      math(EXPR count_${folder} "0${count_${folder}} + 1")
    endif()
    set_source_files_properties("${source}" PROPERTIES UNITY_GROUP ${folder}_${group})
  endforeach()
endfunction()

# Compiles each source once per instruction set, with MUSTER_ISA=baseline, avx2 or avx512 (x86-64) or baseline alone
# (elsewhere), and adds the objects to the target. The source puts its functions into a namespace named MUSTER_ISA;
# the target knows by the definition MUSTER_X86_ISA that the other two exist. Such a file must not include headers
# with inline functions that other files use too: the linker could keep the copy with the wider instructions.
# Nobody reads floating-point traps: without them comparisons vectorise, with the same results. AVX-512 works on 32-byte
# vectors: with 64-byte divisions and roots an Adam step took a quarter longer, and nothing was faster (Zen 4).
function(muster_add_isa_sources target)
  if(NOT ARGN)
    return()
  endif()
  set(isas baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND isas avx2 avx512)
    target_compile_definitions(${target} PRIVATE MUSTER_X86_ISA)
  endif()
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 ${flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=256)
  foreach(isa ${isas})
    add_library(${target}_${isa} OBJECT ${ARGN})
    target_include_directories(${target}_${isa} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
    target_compile_definitions(${target}_${isa} PRIVATE MUSTER_ISA=${isa})
    target_compile_options(${target}_${isa} PRIVATE ${flags_${isa}} -fno-trapping-math)
    muster_build_options(${target}_${isa})
    set_target_properties(${target}_${isa} PROPERTIES UNITY_BUILD OFF)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
  endforeach()
endfunction()

# Compiles `source` of the target with OpenMP, and links the OpenMP library that torch brings along: a second one would
# have threads of its own. Without it (another threading in torch, clang's lint, the thread sanitizer, which cannot see
# into it) the file runs on one thread.
option(MUSTER_OPENMP "Use torch's OpenMP threads" ON)
function(muster_use_openmp target source)
  file(GLOB library LIST_DIRECTORIES OFF "${MusterTorch_ROOT_DIR}/lib/libgomp*.so*")
  if(NOT MUSTER_OPENMP OR MUSTER_SANITIZE STREQUAL "thread" OR NOT library)
    return()
  endif()
  list(GET library 0 library)
  set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -fopenmp SKIP_PRECOMPILE_HEADERS ON)
  target_link_libraries(${target} PRIVATE "${library}")
endfunction()

# Declares the option `name` for what is built AUTO (where it can be), ON (or fails) or OFF.
function(muster_auto_option name meaning)
  set(${name} AUTO CACHE STRING "${meaning}: AUTO (where what it needs is found), ON or OFF")
  set_property(CACHE ${name} PROPERTY STRINGS AUTO ON OFF)
  if(NOT ${name} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${name} is '${${name}}'; give AUTO, ON or OFF.")
  endif()
endfunction()
