package gguf

import "fmt"

// Type is the type of a tensor's elements. Its numbers are those of ggml_type.
type Type uint32

// The types that this package decodes.
const (
	F32  Type = 0
	F16  Type = 1
	Q4_0 Type = 2
	Q4_1 Type = 3
	Q5_0 Type = 6
	Q5_1 Type = 7
	Q8_0 Type = 8
	Q4_K Type = 12
	Q5_K Type = 13
	Q6_K Type = 14
	BF16 Type = 30
)

// layouts has the block layouts of the types that this package decodes. A row is a sequence of blocks.
var layouts = map[Type]layout{
	F32:  {"F32", 1, 4, decodeF32},
	F16:  {"F16", 1, 2, decodeF16},
	BF16: {"BF16", 1, 2, decodeBF16},
	Q8_0: {"Q8_0", 32, 2 + 32, decodeQ8_0},
	Q4_0: {"Q4_0", 32, 2 + 16, decodeQ4_0},
	Q4_1: {"Q4_1", 32, 2 + 2 + 16, decodeQ4_1},
	Q5_0: {"Q5_0", 32, 2 + 4 + 16, decodeQ5_0},
	Q5_1: {"Q5_1", 32, 2 + 2 + 4 + 16, decodeQ5_1},
	Q4_K: {"Q4_K", 256, 2 + 2 + 12 + 128, decodeQ4_K},
	Q5_K: {"Q5_K", 256, 2 + 2 + 12 + 32 + 128, decodeQ5_K},
	Q6_K: {"Q6_K", 256, 128 + 64 + 16 + 2, decodeQ6_K},
}

type layout struct {
	name     string
	elements int // in a block
	bytes    int // size of a block
	decode   decoder
}

// others names the types that this package does not decode, for errors.
var others = map[Type]string{
	4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K",
	16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
	24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
	31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
	36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}

// String returns the type's name in ggml.
func (t Type) String() string {
	if l, ok := layouts[t]; ok {
		return l.name
	}
	if name, ok := others[t]; ok {
		return name
	}
	return fmt.Sprintf("type %d", uint32(t))
}
