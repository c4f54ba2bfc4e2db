package decoder

import (
	"encoding/binary"
	"fmt"
	"iter"
	"math"
	"slices"
	"sync"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/decoder/internal/hf"
	"gorgonia.org/leanattention/nn"

	"gorgonia.org/tensor"
)

// packed is the weights of a folder with quantised matrices. A matrix is either one tensor, or the tensors of a method in its place:
// GPTQ and AWQ have
//
//	name.qweight  integers, some in each number of 32 bits
//	name.qzeros   the zeros of groups, likewise; (groups, out / integers of a number)
//	name.scales   the scales of groups, (groups, out)
//	name.g_idx    the group of each column; GPTQ, and optional if columns are in order
//
// See eight.go for E4M3. An element is scale * (integer - zero). A matrix becomes rows of nn.Quantised, whose blocks have the same numbers: 32 to 128 elements
// with one scale.
type packed struct {
	folder
	how      *quantization
	matrices map[string]*packedMatrix // by weight

	mu    sync.Mutex
	last  *groups // of the matrix that was read last
	spare groups  // memory
	order []int32 // of the matrix with an order that was read last
}

// packedMatrix is a matrix of (out, in).
type packedMatrix struct {
	module  string // names without a suffix
	out, in int
	ordered bool // the file has g_idx
}

func newPacked(f folder, how *quantization) *packed {
	return &packed{folder: f, how: how, matrices: map[string]*packedMatrix{}}
}

// fail makes an error of a module.
func (p *packed) fail(m *packedMatrix, kind error, format string, args ...any) error {
	return fmt.Errorf("decoder: %s: %.200s: %s: %w", p.Path(""), m.module, fmt.Sprintf(format, args...), kind)
}

// groupOf returns the elements of a group.
func (p *packed) groupOf(m *packedMatrix) int {
	if p.how.group == 0 {
		return m.in
	}
	return p.how.group
}

// tensors returns the tensors of a matrix.
func (p *packed) tensors(m *packedMatrix) []hf.Weight {
	if p.how.eight != noEight {
		return p.eightTensors(m)
	}
	per := 32 / p.how.bits // integers of a number
	groups := (m.in-1)/p.groupOf(m) + 1
	whole := []string{"I32", "U32"}
	all := []hf.Weight{
		{Name: m.module + ".qweight", Shape: []int{m.in / per, m.out}, Types: whole},
		{Name: m.module + ".qzeros", Shape: []int{groups, m.out / per}, Types: whole},
		{Name: m.module + ".scales", Shape: []int{groups, m.out}},
	}
	if p.how.method == "awq" {
		all[0].Shape = []int{m.in, m.out / per}
	}
	if m.ordered {
		all = append(all, hf.Weight{Name: m.module + ".g_idx", Shape: []int{m.in}, Types: whole})
	}
	return all
}

// Check compares the tensors with the weights of a model. A module may have a bias of zeros that the model lacks, as AutoGPTQ writes.
func (p *packed) Check(weights iter.Seq[hf.Weight], tied ...string) error {
	known := map[string]bool{}
	var all []hf.Weight
	for w := range weights {
		known[w.Name] = true
		m := p.matrixOf(&w)
		if m == nil {
			all = append(all, w)
			continue
		}
		m.ordered = p.how.method == "gptq" && (p.how.order || p.Has(m.module+".g_idx"))
		if per := 32 / p.how.bits; p.how.eight == noEight && (m.in%32 != 0 || m.out%per != 0) {
			return p.fail(m, ErrUnsupported, "the weight has shape %v; known are multiples of %d rows and of 32 columns: %s", w.Shape, per, wayOut)
		}
		p.matrices[w.Name] = m
		all = append(all, p.tensors(m)...)
	}
	if len(p.matrices) == 0 {
		return fmt.Errorf("decoder: %s: quant_method is %q, and no matrix of the folder is quantised: %w", p.how.file, p.how.method, ErrFormat)
	}
	for _, m := range p.matrices {
		bias := m.module + ".bias"
		if known[bias] || !p.Has(bias) {
			continue
		}
		x := make([]float32, m.out)
		if err := p.folder.float32s(x, bias, []int{m.out}, 0, m.out); err != nil {
			return err
		}
		if i := slices.IndexFunc(x, func(v float32) bool { return v != 0 }); i >= 0 {
			return p.fail(m, ErrUnsupported, "bias[%d] is %v, and the model has no bias", i, x[i])
		}
		tied = append(tied, bias)
	}
	return p.folder.Check(slices.Values(all), append(tied, p.otherScales()...)...)
}

// groups is a matrix as nn.Quantised has it, but for its integers, which stay as the file has them.
type groups struct {
	of              *packedMatrix
	integers, zeros []byte
	scales          []la.F16
	wide            []float32 // the scales
	order           []int32   // nil: columns are in order
	group           []int32   // of each block
	block           int       // elements
	format          string
	index           []byte // g_idx
}

// read reads a matrix. p.mu must be held.
func (p *packed) read(m *packedMatrix) (g *groups, err error) {
	if p.last != nil && p.last.of == m {
		return p.last, nil
	}
	p.last = nil
	g = &p.spare
	g.of, g.order = m, nil
	for i, t := range p.tensors(m) {
		to := []*[]byte{&g.integers, &g.zeros, nil, &g.index}[i]
		if to == nil {
			if err := p.readScales(g, t); err != nil {
				return nil, err
			}
			continue
		}
		if *to, err = p.Bytes(*to, t.Name, t.Shape); err != nil {
			return nil, err
		}
	}
	if err := p.place(g); err != nil {
		return nil, err
	}
	if err := p.checkZeros(g); err != nil {
		return nil, err
	}
	p.last = g
	return g, nil
}

// readScales reads the scales.
func (p *packed) readScales(g *groups, t hf.Weight) error {
	n := t.Shape[0] * t.Shape[1]
	g.wide, g.scales = slices.Grow(g.wide[:0], n)[:n], slices.Grow(g.scales[:0], n)[:n]
	if err := p.folder.float32s(g.wide, t.Name, t.Shape, 0, t.Shape[0]); err != nil {
		return err
	}
	err := la.Convert(g.scales, g.wide)
	for i, x := range g.wide {
		if x-x != 0 || err == nil && g.scales[i].Float32() != x || err != nil && math.Abs(float64(x)) >= 65520 {
			return p.fail(g.of, ErrUnsupported, "scales[%d][%d] is %v, which is no finite float16: %s", i/g.of.out, i%g.of.out, x, wayOut)
		}
	}
	return err
}

// place finds the order of the columns, and the group of each block.
func (p *packed) place(g *groups) error {
	m, size := g.of, p.groupOf(g.of)
	count := (m.in-1)/size + 1
	members := make([][]int32, count) // columns of each group
	inOrder := true
	for i := range m.in {
		group := i / size
		if m.ordered {
			if group = int(int32(binary.LittleEndian.Uint32(g.index[4*i:]))); group < 0 || group >= count {
				return p.fail(m, ErrFormat, "g_idx[%d] is %d, not in [0, %d)", i, group, count)
			}
		}
		inOrder = inOrder && group == i/size
		members[group] = append(members[group], int32(i))
	}
	if !inOrder && !p.how.order {
		return p.fail(m, ErrFormat, "g_idx has another order than that of the columns, and desc_act is false")
	}
	g.block = 128
	for _, of := range members {
		for len(of)%g.block != 0 {
			g.block /= 2
		}
	}
	if g.block < 32 {
		return p.fail(m, ErrUnsupported, "g_idx has groups of other sizes than multiples of 32: %s", wayOut)
	}
	if g.format = fmt.Sprintf("int4_%d", g.block); p.how.bits == 8 {
		g.block, g.format = 32, "Q8_0"
	}
	g.group = g.group[:0]
	for i, of := range members {
		for range len(of) / g.block {
			g.group = append(g.group, int32(i))
		}
	}
	if !inOrder {
		if order := slices.Concat(members...); !slices.Equal(order, p.order) { // layers with one order share a slice, and then an x
			p.order = order
		}
		g.order = p.order
	}
	return nil
}

// awqPlaces has the place of each of eight columns in a number of AWQ.
var awqPlaces = [8]int{0, 4, 1, 5, 2, 6, 3, 7}

// ofOut returns the number that has the integer of an output feature, counted from the first of a row, and its shift.
func (p *packed) ofOut(out int) (number, shift int) {
	if p.how.method == "awq" {
		return out / 8, 4 * awqPlaces[out%8]
	}
	per := 32 / p.how.bits
	return out / per, p.how.bits * (out % per)
}

// zero returns the zero of a group.
func (p *packed) zero(g *groups, group, out int) int {
	number, shift := p.ofOut(out)
	per := 32 / p.how.bits
	stored := binary.LittleEndian.Uint32(g.zeros[4*(group*(g.of.out/per)+number):]) >> shift & (1<<p.how.bits - 1)
	return int(stored) + p.how.less
}

// checkZeros refuses zeros with two meanings, and zeros that contradict the configuration.
func (p *packed) checkZeros(g *groups) error {
	for group := range (g.of.in-1)/p.groupOf(g.of) + 1 {
		for out := range g.of.out {
			switch zero := p.zero(g, group, out); {
			case p.how.zero >= 0 && zero != p.how.zero:
				return p.fail(g.of, ErrFormat, "the zero of group %d of row %d is %d, and sym is true: it has to be %d", group, out, zero, p.how.zero)
			case zero == 1<<p.how.bits:
				return p.fail(g.of, ErrUnsupported, "qzeros has %d for group %d of row %d, which programs read as 0 or as %d: write the folder with checkpoint_format gptq_v2", zero-1, group, out, zero)
			}
		}
	}
	return nil
}

// rowBytes returns the bytes of a row of nn.Quantised.
func rowBytes(format string, in int) int {
	switch format {
	case "int4_32":
		return in / 32 * 19
	case "int4_64":
		return in / 64 * 35
	case "int4_128":
		return in / 128 * 67
	}
	return in / 32 * 34 // Q8_0
}

// rows writes rows from on to dst.
func (p *packed) rows(g *groups, dst []byte, from, to int) {
	row := rowBytes(g.format, g.of.in)
	size := row / (g.of.in / g.block)
	per := 32 / p.how.bits
	const tile = 16 // output features of a cache line
	each((to-from)*g.of.in, func(begin, end int) {
		begin, end = begin/g.of.in, end/g.of.in
		numbers, shifts := make([]int, g.block), make([]int, g.block) // of the elements of a block, for the first output feature
		for first := begin; first < end; first += tile {
			last := min(first+tile, end)
			for b := range g.group {
				for i := range g.block {
					column := b*g.block + i
					if g.order != nil {
						column = int(g.order[column])
					}
					if numbers[i], shifts[i] = column/per*g.of.out, p.how.bits*(column%per); p.how.method == "awq" {
						numbers[i], shifts[i] = column*(g.of.out/per), 0
					}
				}
				for o := first; o < last; o++ {
					p.blockOf(g, dst[o*row+b*size:][:size], b, from+o, numbers, shifts)
				}
			}
		}
	})
}

// blockOf writes a block of a row.
func (p *packed) blockOf(g *groups, to []byte, block, out int, numbers, shifts []int) {
	group := int(g.group[block])
	binary.LittleEndian.PutUint16(to, uint16(g.scales[group*g.of.out+out]))
	number, shift := out, 0
	if p.how.method == "awq" {
		number, shift = p.ofOut(out)
	}
	at := func(i int) byte {
		return byte(binary.LittleEndian.Uint32(g.integers[4*(numbers[i]+number):]) >> (shifts[i] + shift))
	}
	if p.how.bits == 8 {
		for i := range numbers {
			to[2+i] = at(i) - 128
		}
		return
	}
	to[2] = byte(p.zero(g, group, out))
	for i := range len(numbers) / 32 {
		for j := range 16 {
			to[3+16*i+j] = at(32*i+j)&15 | at(32*i+16+j)<<4
		}
	}
}

// blocks returns rows of a matrix in the groups of the file; nil: the weight is one tensor.
func (p *packed) blocks(name string, shape []int, from, to int) (*nn.Quantised, error) {
	m := p.matrices[name]
	if m == nil {
		return nil, nil
	}
	if !slices.Equal(shape, []int{m.out, m.in}) || from < 0 || from >= to || to > m.out {
		return nil, p.fail(m, ErrMissing, "rows [%d, %d) of a weight with shape %v", from, to, shape)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.how.eight != noEight {
		return p.eightRows(m, from, to)
	}
	g, err := p.read(m)
	if err != nil {
		return nil, err
	}
	q := &nn.Quantised{Format: g.format, Rows: to - from, Columns: m.in, Data: fresh[byte]((to - from) * rowBytes(g.format, m.in)), Order: g.order}
	p.rows(g, q.Data, from, to)
	return q, nil
}

// blockRow returns the bytes of a row that blocks returns, of groups in the order of the columns.
func (p *packed) blockRow(name string) int {
	m := p.matrices[name]
	switch {
	case m == nil:
		return 0
	case p.how.eight != noEight: // and scales
		if p.how.eight == eightByBlock {
			return m.in + 4*((m.in-1)/eightBlock+1)
		}
		return m.in + 4
	case p.how.bits == 8:
		return rowBytes("Q8_0", m.in)
	}
	block := 128
	for m.in%block != 0 || p.groupOf(m)%block != 0 {
		block /= 2
	}
	return rowBytes(fmt.Sprintf("int4_%d", block), m.in)
}

// float32s decodes rows.
func (p *packed) float32s(dst []float32, name string, shape []int, from, to int) error {
	q, err := p.blocks(name, shape, from, to)
	if err != nil {
		return err
	}
	if q == nil {
		return p.folder.float32s(dst, name, shape, from, to)
	}
	row := len(q.Data) / q.Rows
	each(len(dst), func(begin, end int) {
		for r := begin / q.Columns; r < end/q.Columns; r++ {
			if to := dst[r*q.Columns:][:q.Columns]; p.how.eight != noEight {
				decodeEight(q, to, r)
			} else {
				decodeGroups(q, to, q.Data[r*row:][:row])
			}
		}
	})
	return nil
}

// decodeGroups decodes a row.
func decodeGroups(q *nn.Quantised, dst []float32, row []byte) {
	bytes, elements := 34, 32
	if q.Format != "Q8_0" {
		fmt.Sscanf(q.Format, "int4_%d", &elements)
		bytes = 3 + elements/2
	}
	for i := range dst {
		b, e := row[i/elements*bytes:], i%elements
		scale := la.F16(binary.LittleEndian.Uint16(b)).Float32()
		integer := 0
		if q.Format == "Q8_0" {
			integer = int(int8(b[2+e]))
		} else {
			integer = int(b[3+e/32*16+e%16]>>(e%32/16*4)&15) - int(b[2])
		}
		to := i
		if q.Order != nil {
			to = int(q.Order[i])
		}
		dst[to] = scale * float32(integer)
	}
}

// stored returns the type of a weight that an engine has without blocks.
func (p *packed) stored(name string) tensor.Dtype {
	if p.matrices[name] != nil {
		return la.Float16
	}
	return p.folder.stored(name)
}

// Tensor returns a weight, a quantised one as float16.
func (p *packed) Tensor(name string, shape ...int) (*tensor.Dense, error) {
	if p.matrices[name] == nil {
		return p.folder.Tensor(name, shape...)
	}
	return p.rowsAs(name, tensor.Dtype{}, shape, 0, shape[0])
}

// rowsAs returns rows of a weight.
func (p *packed) rowsAs(name string, as tensor.Dtype, shape []int, from, to int) (*tensor.Dense, error) {
	if p.matrices[name] == nil {
		return p.folder.rowsAs(name, as, shape, from, to)
	}
	if as == (tensor.Dtype{}) {
		as = la.Float16
	}
	t, err := rowsOf(as, shape, from, to)
	if err != nil {
		return nil, fmt.Errorf("decoder: weight %s: %w", name, err)
	}
	some := max(1, 1<<19/shape[1]) // rows at a time
	wide := make([]float32, min(some, to-from)*shape[1])
	for at := from; at < to; at += some {
		end := min(at+some, to)
		part := wide[:(end-at)*shape[1]]
		if err := p.float32s(part, name, shape, at, end); err != nil {
			return nil, err
		}
		if err := convert(t.Data(), (at-from)*shape[1], part); err != nil {
			return nil, fmt.Errorf("decoder: weight %s: %w", name, err)
		}
	}
	return t, nil
}

// loaded frees the memory of reading.
func (p *packed) loaded() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.spare, p.order = nil, groups{}, nil
}
