# Bytes of a file as a C array: cmake -DFROM=file -DTO=source.c -DNAME=symbol -P embed.cmake. FROM empty: no bytes.
set(bytes "")
if(FROM)
  file(READ "${FROM}" hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
endif()
file(WRITE "${TO}" "/* Made by client/kernels/embed.cmake. */
#include <stddef.h>
extern const unsigned char ${NAME}[];
extern const size_t ${NAME}_bytes;
const unsigned char ${NAME}[] = {${bytes}0};
const size_t ${NAME}_bytes = sizeof ${NAME} - 1;
")
