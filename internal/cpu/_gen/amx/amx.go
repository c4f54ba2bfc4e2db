// Package amx has the instructions of AMX on tiles of bfloat16 and of signed bytes, and one of AVX-512 for bfloat16, which
// neither avo nor Go's assembler knows.
// For avo they are instructions with names only, so that it finds registers for their operands; Encode then
// writes them as bytes.
package amx

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/mmcloughlin/avo/ir"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// instruction is one on tile registers and on general ones, which it reads.
func instruction(opcode string, tiles []int, registers ...reg.Register) *ir.Instruction {
	i := &ir.Instruction{Opcode: opcode}
	for _, t := range tiles {
		i.Operands = append(i.Operands, operand.U8(t))
	}
	for _, r := range registers {
		i.Operands = append(i.Operands, r)
		i.Inputs = append(i.Inputs, r)
	}
	return i
}

// LoadConfig makes tile registers of the sizes that lie in memory: see Config.
func LoadConfig(config reg.Register) *ir.Instruction { return instruction("LDTILECFG", nil, config) }

// Release puts tile registers back to where threads need not save them.
func Release() *ir.Instruction { return instruction("TILERELEASE", nil) }

// Zero makes all elements of tile t 0.
func Zero(t int) *ir.Instruction { return instruction("TILEZERO", []int{t}) }

// Load loads rows that lie ld bytes apart.
func Load(base, ld reg.Register, t int) *ir.Instruction {
	return instruction("TILELOADD", []int{t}, base, ld)
}

// Store stores rows, ld bytes apart.
func Store(t int, base, ld reg.Register) *ir.Instruction {
	return instruction("TILESTORED", []int{t}, base, ld)
}

// Multiply adds to c the product of a and b, in float32 of bfloat16: c[r][n] += a[r][2k+i] b[k][2n+i].
// Numbers that are not normal are 0.
func Multiply(a, b, c int) *ir.Instruction { return instruction("TDPBF16PS", []int{c, a, b}) }

// MultiplyBytes adds to c the product of a and b, in int32 of signed bytes: c[r][n] += a[r][4k+i] b[k][4n+i].
func MultiplyBytes(a, b, c int) *ir.Instruction { return instruction("TDPBSSD", []int{c, a, b}) }

// Round rounds two vectors of float32 to one of bfloat16, low's elements first, ties to even. Numbers that are not normal
// are 0.
func Round(high, low, to reg.Register) *ir.Instruction {
	return &ir.Instruction{
		Opcode: "VCVTNE2PS2BF16", Operands: []operand.Op{low, high, to},
		Inputs: []operand.Op{low, high}, Outputs: []operand.Op{to},
	}
}

// Config is the memory that LoadConfig reads, for tiles of 64 bytes a row: rows rows in the first seven, and
// 16 in the last.
func Config(rows int) [8]uint64 {
	return Shapes([8][2]int{{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {16, 64}})
}

// Shapes is the memory that LoadConfig reads, for tiles of some rows, and some bytes a row.
func Shapes(tiles [8][2]int) (memory [8]uint64) {
	memory[0] = 1 // the palette
	for t, of := range tiles {
		memory[2+t/4] |= uint64(of[1]) << (t % 4 * 16)
		memory[6] |= uint64(of[0]) << (8 * t)
	}
	return memory
}

// The encodings: VEX.128, map 0F38, W0.
var encodings = map[string]struct{ prefix, opcode int }{
	"LDTILECFG":   {0, 0x49},
	"TILERELEASE": {0, 0x49},
	"TILEZERO":    {3, 0x49},
	"TILELOADD":   {3, 0x4b},
	"TILESTORED":  {2, 0x4b},
	"TDPBF16PS":   {2, 0x5c},
	"TDPBSSD":     {3, 0x5e},
}

var (
	round   = regexp.MustCompile(`(?m)^\tVCVTNE2PS2BF16\b *Z(\d+), Z(\d+), Z(\d+)$`)
	line    = regexp.MustCompile(`(?m)^\t(LDTILECFG|TILE[A-Z]+|TDP[A-Z0-9]+)\b *(.*)$`)
	numbers = map[string]int{"AX": 0, "CX": 1, "DX": 2, "BX": 3, "SP": 4, "BP": 5, "SI": 6, "DI": 7}
)

// Encode writes the instructions of AMX in an assembly file as bytes.
func Encode(text string) string {
	text = round.ReplaceAllStringFunc(text, func(s string) string {
		var of [3]int
		for i, t := range round.FindStringSubmatch(s)[1:] {
			of[i], _ = strconv.Atoi(t) // digits
		}
		low, high, to := of[0], of[1], of[2]
		// EVEX.512.F2.0F38.W0 72 /r, with bits that are 0 for the upper registers.
		not := func(n, bit int) int { return 1 - n>>bit&1 }
		return bytesOf([]int{
			0x62,
			not(to, 3)<<7 | not(low, 4)<<6 | not(low, 3)<<5 | not(to, 4)<<4 | 2,
			(15-high&15)<<3 | 1<<2 | 3,
			2<<5 | not(high, 4)<<3,
			0x72,
			0xc0 | to&7<<3 | low&7,
		}, s)
	})
	return line.ReplaceAllStringFunc(text, func(s string) string {
		m := line.FindStringSubmatch(s)
		var tiles, registers []int
		for _, s := range strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' || r == ' ' }) {
			if t, ok := strings.CutPrefix(s, "$"); ok {
				n, err := strconv.ParseInt(t, 0, 8)
				if err != nil {
					panic(err)
				}
				tiles = append(tiles, int(n))
			} else if n, ok := numbers[s]; ok {
				registers = append(registers, n)
			} else if n, err := strconv.Atoi(strings.TrimPrefix(s, "R")); err == nil {
				registers = append(registers, n)
			} else {
				panic("no register: " + s)
			}
		}
		e, tile, other, free := encodings[m[1]], 0, 0, 15
		if len(tiles) > 0 {
			tile = tiles[0]
		}
		var operands []int
		x, b := 1, 1 // bits that are 0 for the upper eight registers
		switch {
		case len(registers) > 0:
			index := 4 // none
			if len(registers) == 2 {
				index = registers[1]
				x = 1 - index/8
			}
			b = 1 - registers[0]/8
			operands = []int{0x44 | tile<<3, index%8<<3 | registers[0]%8, 0} // with an offset of 0
		case len(tiles) == 3:
			other, free = tiles[1], 15-tiles[2]
			fallthrough
		default:
			operands = []int{0xc0 | tile<<3 | other}
		}
		return bytesOf(append([]int{0xc4, 0x82 | x<<6 | b<<5, free<<3 | e.prefix, e.opcode}, operands...), s)
	})
}

// bytesOf writes an instruction as bytes.
func bytesOf(code []int, instruction string) string {
	var out []string
	for _, n := range code {
		out = append(out, fmt.Sprintf("BYTE $0x%02x", n))
	}
	return "\t" + strings.Join(out, "; ") + " // " + strings.TrimSpace(instruction)
}
