package attention

import (
	"math/bits"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// This file mirrors the kernels' struct Shape and the layout of shared memory in Lean::run (kernels/attn_ring.cuh,
// kernels/attn_lean.cuh).

// Constants of the kernels.
const (
	BlockRows     = 16 // rows of an output tile: those of a tensor core product
	mostBlockRows = 64 // of kernels for keys that hold the values
	ConsumerWarps = 4  // warps that multiply, at most
	producerWarps = 4  // warps that copy keys and values, from 9.0 on: two of them fill every second slot
	epilogueWarps = 4  // warps that merge and store output tiles, on 9.0 alone
)

const (
	defaultTile   = 64        // keys
	invariantTile = 1024      // with batch invariance: each LeanTile has a state
	mostChunk     = 64        // keys: a LeanTile is whole chunks of any type
	RingBytes     = 128 << 10 // largest ring; kernels keep 64 to 128 KB of loads in flight
	wideRingBytes = 192 << 10 // for rows longer than a column block, from 9.0 on
	mostStages    = 6         // of a warp's part of the ring, before 9.0
	appendThreads = 256

	mostKeyRows    = 1<<31 - 1<<16 // row numbers have 32 bits
	mostPackedRows = 1 << 22       // of a sequence: kernels divide rows by the group in float32

	// tableSlack is the number of entries after the block table's last entry that kernels may load and do not use.
	tableSlack = 64
)

// Constants of the kernels for output tiles of one row.
const (
	// rowOperands is the shared memory besides the ring, in bytes: a query as eight columns, the weights of rowChunks
	// chunks, twice, and the factors of four states, twice.
	rowChunks   = 4
	rowOperands = 8*64*2 + 2*rowChunks*mostChunk*8*2 + 2*ConsumerWarps*4

	// longReads is the least number of bytes of keys and values that a thread block reads with these kernels. Compared
	// with the other kernels on an H100, launches with 3.6 MB took 0.7% longer, with 7.1 MB 0.5% longer, and with 14 MB
	// as long.
	longReads = 4 << 20
)

// shape has the sizes that follow from an element type and a head dim.
type shape struct {
	element attn.DType
	dim     int
	keys    int  // of a chunk
	blocks  int  // column blocks of 128 bytes in a row
	slot    int  // bytes of a chunk's keys and values
	ring    int  // bytes of the ring, if shared memory suffices
	query   int  // bytes of queries in shared memory, or of scales
	width   int  // floats between rows of a state in shared memory
	apart   bool // each copy has one column block
	packed  bool // a row takes its own bytes alone
	pairs   bool // two consumer warps share chunks, where there are epilogue warps
}

// shape returns the shape for the engine's GPU. From 9.0 on chunks are larger.
func (e *Engine) shape(element attn.DType, dim int) shape {
	s := shape{element: element, dim: dim, keys: gpu.Depth(element), ring: RingBytes, width: dim + 8, pairs: element.Size() == 1 || element == attn.Q4}
	row, more := dim/element.Columns()*element.Size(), 1
	if e.hasCopyEngine() {
		more = 2
		if row > 128 {
			s.ring = wideRingBytes
		}
	}
	switch {
	case row <= 128:
		s.keys *= 2 * more
	case row <= 256:
		s.keys *= more
	}
	s.blocks = (row + 127) / 128
	if s.pairs {
		s.keys = 32 * more
	}
	s.slot = 2 * s.blocks * s.keys * 128
	if element == attn.Q4 {
		if s.slot, s.ring = 2*s.keys*row, RingBytes; e.hasEpilogue() {
			if s.ring, s.query = 80<<10, 64<<10; dim > 128 { // query: a table
				s.ring = 144 << 10 // two slots for each warp
			}
		}
		return s
	}
	if element.Size() == 1 {
		if e.hasCopyEngine() {
			s.slot, s.ring = 2*s.keys*dim, wideRingBytes
		}
		s.query = s.ring / s.slot * 2 * s.keys * 4
		return s
	}
	if row > 256 {
		if element.Size() == 2 {
			s.query = (dim + 15) / 16 * 32 * 16 * 2
		} else {
			s.query = dim / 8 * 32 * 16
		}
	}
	return s
}

// shapeOf returns the shape for a kernel of the table.
func (e *Engine) shapeOf(k *kernel, dim int) shape {
	s := e.shape(k.kv, dim)
	if k.chunk > 0 {
		s.keys, s.slot, s.apart = k.chunk, k.chunk*128, true
	}
	if k.row {
		s.query = rowOperands
	}
	if k.packed {
		s.keys = max(s.keys, 32)
		s.slot = 2 * s.keys * dim * s.element.Size()
	}
	return s
}

// tiles describes rows of keys to the copy engine. If the kernel's rows are whole column blocks, a box can hold all
// blocks of a chunk, unless each copy has one. What a box has beside an array is zeros.
func (s *shape) tiles(of columns, rows, box int) cuda.Tiles {
	size := s.element.Size()
	if size == 1 { // lines of 128 bytes, each one key, or two, or half of one, as elements of 16 bits
		lines := uint64(max(rows*s.dim/128, 1))
		return cuda.Tiles{ElementBytes: 2, Dims: [3]uint64{64, lines, 1}, Strides: [2]uint64{128, 128 * lines}, Box: [3]uint32{64, uint32(box * s.dim / 128), 1}}
	}
	row, column := uint64(int(of.dim)*size), 128/size
	t := cuda.Tiles{ElementBytes: size, Box: [3]uint32{uint32(column), uint32(box), 1}}
	if s.dim*size%128 == 0 {
		t.Dims = [3]uint64{uint64(column), uint64(rows), uint64(s.blocks)}
		t.Strides = [2]uint64{row, 128}
		if int(of.dim) != s.dim {
			t.Dims[0] = uint64(of.taken)
			if s.blocks > 1 {
				t.Strides[1] = uint64(int(of.step) * size)
			}
		}
		if box == s.keys && !s.apart {
			t.Box[2] = uint32(s.blocks)
		}
	} else {
		t.Dims = [3]uint64{uint64(of.dim), uint64(rows), 1}
		t.Strides = [2]uint64{row, row * uint64(rows)}
	}
	return t
}

// boxOf returns the number of keys of a copy: a power of two that divides the chunk and the page.
func boxOf(chunk int, paged bool, pageTokens int) int {
	if !paged {
		return chunk
	}
	return min(chunk, pageTokens&-pageTokens)
}

// pages returns the number of pages of a chunk. It returns 1 if a page is one chunk or more, and 0 if keys are not
// paged or pages do not have a power of two of tokens.
func (s *shape) pages(paged bool, pageTokens int) int {
	if !paged || pageTokens&(pageTokens-1) != 0 {
		return 0
	}
	return max(s.keys/pageTokens, 1)
}

// tileRows returns the largest number of rows of k's output tiles, if k is no prefill kernel.
func (k *kernel) tileRows(group, queries int) int { return rowsOf(k.blockRows(), group, queries) }

// rowsOf returns the number of rows of a sequence of `queries` queries, at most `most`.
func rowsOf(most, group, queries int) int { return min(most, min(max(queries, 1), most)*group) }

// config is the configuration of a kernel's launch.
type config struct {
	warps   int // consumer warps
	slots   int // of the ring, a multiple of warps
	buffers int // of the warps' states in shared memory
	parts   int // log2 of the warps that share a row's partials
	threads int
	shared  int // bytes
}

// configure returns the configuration for output tiles of at most `rows` rows: as many warps as fit with a ring of two
// stages each, two buffers of states if they fit, and a ring of at most s.ring bytes in the rest.
func (e *Engine) configure(s shape, rows int) (config, bool) {
	for warps := ConsumerWarps; warps > 0; warps-- {
		for buffers := 2; buffers > 0; buffers-- {
			rest := s.query + buffers*(warps*rows*s.width*4+2*BlockRows*16) + 4*8 + 16
			room := (e.info.SharedPerBlockMost - rest) / (s.slot + 16)
			stages := min(s.ring/s.slot, room) / warps
			if e.hasCopyEngine() {
				if warps%2 != 0 {
					stages &^= 1 // the number of slots must be even
				}
			} else {
				stages = min(stages, mostStages)
			}
			if stages < 2 {
				continue
			}
			c := config{warps: warps, slots: warps * stages, buffers: buffers, threads: warps * 32}
			c.parts = max(bits.Len(uint(warps/rows))-1, 0)
			if e.hasEpilogue() {
				if c.threads = (ConsumerWarps + producerWarps + epilogueWarps) * 32; s.pairs {
					c.threads += ConsumerWarps * 32 // two share chunks
				}
			} else if e.hasCopyEngine() {
				c.threads += producerWarps * 32
			}
			c.shared = rest + c.slots*(s.slot+16)
			return c, true
		}
	}
	return config{}, false
}
