# The GPUs that a build has code for.

# Sets `result` to a value of CMAKE_CUDA_ARCHITECTURES. `wanted`: architectures as torch spells them in
# TORCH_CUDA_ARCH_LIST, "8.0 9.0a+PTX"; where it is empty, those of A100, H100 and B200 that the compiler `nvcc` knows,
# and PTX of the last one for GPUs that come after.
function(muster_cuda_architectures result nvcc wanted)
  if(wanted)
    # 80-real;90a: CMake's bare numbers build the machine code and PTX.
    string(REGEX REPLACE "[ ,;]+" ";" architectures "${wanted}")
    list(TRANSFORM architectures REPLACE "\\." "")
    list(TRANSFORM architectures APPEND "-real")
    list(TRANSFORM architectures REPLACE "\\+PTX-real$" "")
  else()
    set(architectures)
    execute_process(COMMAND "${nvcc}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
    foreach(architecture 80 90 100)
      if(known MATCHES "compute_${architecture}(\n|$)")
        list(TRANSFORM architectures APPEND "-real" REGEX "[0-9]$")
        list(APPEND architectures ${architecture})
      endif()
    endforeach()
    if(NOT architectures)
      set(architectures 90)
    endif()
  endif()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()
