package layers

import (
	"math"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/weight"
)

// mostParts is the largest number of layers of a Linear.
const mostParts = 3

// Linear is the operands of up to three linear layers of one x:
//
//	y = f(norm(x) W^T + b) + residual,   f the Activation
//
// or, with Gate, of two layers as a gated unit:
//
//	y = f(norm(x) W0^T + b0) (norm(x) W1^T + b1) + residual
//
// X is Rows x In. All operands but W are float32. Residual needs a single part.
//
// The number of rows decides the launch (choice.go): a GEMV (gemv.go), a skinny GEMM (skinny.go) for 16-bit weights
// if the GPU has the kernels, and a GEMM (gemm.go, persistent.go) for more or wider rows. An activation that the
// kernels lack is another launch (composed.go).
type Linear struct {
	Rows, In int
	X        gpu.Memory
	Parts    []LinearPart
	Residual gpu.Memory // as Y; no buffer: none
	Gate     bool       // two parts of one Out, the first a gate; only its Y is written
	Norm     *Norm      // nil: none
	Scratch  gpu.Memory // as many elements as [Engine.Scratch] returns

	Activation attn.Activation
	// RoundX lets the launch round norm(x) to the type of W, or to float16 if W is packed, if that is faster: for 17 rows and more of
	// 16-bit weights, see [Engine.choose], and for 5 and more of packed ones. Rows of float16 are scaled by powers of two first, so that none
	// overflows. The sums, b, f and the residual stay float32.
	//
	// An element of y, before f, is then off by at most 2^-11 (float16) or 2^-8 (bfloat16) of the sum of |norm(x)|
	// |W|. Without RoundX each element of norm(x) is the sum of two parts of W's type, and the bound is 2^-18 or
	// 2^-15.
	RoundX bool
	// Products, of 16 bits, rounds norm(x) and W of float32 to this type for their products, and takes no effect where rows of W have
	// no multiple of 16 bytes of it. The zero value is the type of W.
	Products attn.DType
	// QuantiseX rounds each row of norm(x) to the type of W, if W is packed and of 8 bits and there are weight.LeastQuantisedRows rows or
	// more. A row's scale is its largest magnitude / the type's largest number. RoundX takes no effect on such rows.
	QuantiseX bool
	// Early promises that no queued work writes W or the operands of Norm, so that the launch may read them before
	// the work ahead is done.
	Early bool
}

// LinearPart is one of the layers: W is Out x In, B has Out elements or no
// buffer, Y is Rows x Out.
//
// With Packed, W is 32-bit words in that order, and the layer has the rows of W from First on. If First is 0 and W has more rows than Out,
// the next part has the others.
type LinearPart struct {
	W, B, Y gpu.Memory
	Out     int
	Packed  *weight.Packed
	First   int
}

// linearParams is struct LinearParams.
type linearParams struct {
	maps                     [mostParts]cuda.TensorMap
	w, b, y                  [mostParts]uint64
	x, residual, gamma, beta uint64
	out, tiles               [mostParts]int32
	rows, in                 int32
	split, stages            int32
	norm, activation, early  int32
	eps, offset              float32
	_                        [28]byte
}

// tilesOf returns the number of tiles of all parts, with the given rows of W each. A gated unit has the tiles of one
// part, since the block of a gate's tile has the other part's tile.
func (o *Linear) tilesOf(rows int) (n int) {
	if o.Gate {
		return attn.Ceil(o.Parts[0].Out, rows)
	}
	for i := range o.Parts {
		n += attn.Ceil(o.Parts[i].Out, rows)
	}
	return n
}

// partArgs is the layers of a Linear as arguments of kernels.
type partArgs struct {
	maps       [mostParts]cuda.TensorMap // of W
	b, y       [mostParts]uint64
	out, tiles [mostParts]int32 // tiles: up to the end of each part
}

// partArgs begins with row `row` of x. Tiles and boxes have the given rows of W; a box has one column block, or two
// with pairs.
func (d *Engine) partArgs(o *Linear, row, tile, box int, pairs bool) (p partArgs, err error) {
	tiles, mapOf := 0, d.tensorMap
	if pairs {
		mapOf = d.pairMap
	}
	for i := range mostParts {
		if i < len(o.Parts) {
			part := &o.Parts[i]
			p.b[i], p.out[i] = part.B.AddressOr0(), int32(part.Out)
			if i == 0 || !o.Gate {
				p.y[i] = part.Y.Address() + uint64(row)*uint64(part.Out)*4
			}
			if p.maps[i], err = mapOf(&part.W, o.In, part.Out, box); err != nil {
				return p, err
			}
			tiles += attn.Ceil(part.Out, tile)
		}
		p.tiles[i] = int32(tiles)
	}
	return p, nil
}

// normsBefore reports whether the norm of a Linear of few rows is a launch of its own: if no block or cluster has a
// whole row, and if x is read repeatedly. The error is the driver's.
func (d *Engine) normsBefore(o *Linear) (bool, error) {
	if o.Norm == nil {
		return false, nil
	}
	kernel, err := d.gemvOf(o)
	if err != nil {
		return false, err
	}
	l, ok, err := d.configureGEMV(kernel, o.format(), o.Rows, o.In, o.tilesOf(gemvTile), true)
	return !ok || l.rows < o.Rows, err
}

func (o *Linear) check() error {
	const op = "linear"
	if o.Rows < 1 || o.In < 1 || o.Rows > math.MaxInt32 || o.In > math.MaxInt32/8 {
		return gpu.Errorf(op, attn.ErrShape, "%d rows of %d elements", o.Rows, o.In)
	}
	if len(o.Parts) < 1 || len(o.Parts) > mostParts {
		return gpu.Errorf(op, attn.ErrShape, "%d layers, outside [1, %d]", len(o.Parts), mostParts)
	}
	if o.Activation >= attn.Activations {
		return gpu.Errorf(op, attn.ErrShape, "the activation is %v", o.Activation)
	}
	if err := o.X.CheckFloats(op, "x", o.Rows*o.In); err != nil {
		return err
	}
	if err := o.checkProducts(op); err != nil {
		return err
	}
	w := o.Parts[0].W.DType
	for i := range o.Parts {
		p := &o.Parts[i]
		if f := weight.Dense(p.W.DType); p.Packed != nil {
			if err := p.checkPacked(op, o.In); err != nil {
				return err
			}
		} else if !hasKernels(f) {
			return gpu.Errorf(op, attn.ErrDType, "w is %v", w)
		} else if each := 16 / f.Bytes(); o.In%each != 0 {
			return gpu.Errorf(op, attn.ErrShape, "rows of %d elements; with w of %v it must be a multiple of %d", o.In, w, each)
		}
		if p.Out < 1 || p.Out > math.MaxInt32/8 {
			return gpu.Errorf(op, attn.ErrShape, "%d columns of layer %d", p.Out, i)
		}
		if p.W.DType != w && !o.Narrow() {
			return gpu.Errorf(op, attn.ErrDType, "w of layer %d is %v, of layer 0 %v", i, p.W.DType, w)
		}
		if p.Packed == nil {
			if err := p.W.Check(op, "w", p.Out*o.In); err != nil {
				return err
			}
		}
		if (o.Gate || p.Packed != nil) && p.B.Buffer != nil && p.B.DType == attn.Float32 { // B may begin at any element after the gate's
			if err := p.B.CheckLoose(op, "b", p.Out); err != nil {
				return err
			}
			if p.Packed == nil && p.Out%4 == 0 && p.B.Address()%16 != 0 {
				return gpu.Errorf(op, attn.ErrShape, "b is at %#x, not a multiple of 16", p.B.Address())
			}
		} else if err := p.B.CheckOptional(op, "b", p.Out); err != nil {
			return err
		}
		if o.Gate && i > 0 {
			continue
		}
		if err := p.Y.CheckFloats(op, "y", o.Rows*p.Out); err != nil {
			return err
		}
	}
	if o.Gate && (len(o.Parts) != 2 || o.Parts[0].Out != o.Parts[1].Out || o.Activation == attn.NoActivation) {
		return gpu.Errorf(op, attn.ErrShape, "a gate of %v with %d layers, of which the first has %d columns", o.Activation, len(o.Parts), o.Parts[0].Out)
	}
	if o.Residual.Buffer != nil && len(o.Parts) > 1 && !o.Gate {
		return gpu.Errorf(op, attn.ErrShape, "a residual of %d layers", len(o.Parts))
	}
	if err := o.Residual.CheckOptional(op, "the residual", o.Rows*o.Parts[0].Out); err != nil {
		return err
	}
	if o.Norm == nil {
		return nil
	}
	return o.Norm.check(op, o.In)
}

// Linear queues linear layers. From compute capability 9.0 on, 16-bit weights are read once for up to 128 rows; for
// more rows neighbouring thread blocks read them. On older GPUs rows beyond 16 read the weights again. All operands
// are checked first; errors wrap attn.ErrShape, attn.ErrDType, or are the driver's.
func (d *Engine) Linear(s *cuda.Stream, o *Linear) error {
	if err := o.check(); err != nil {
		return err
	}
	if err := d.checkQuantised("linear", o); err != nil {
		return err
	}
	if product, err := d.multiplies(o); err != nil {
		return err
	} else if product {
		return d.queueProduct(s, o)
	}
	if o.rounds() {
		return d.queueRounded(s, o)
	}
	if separate, err := d.separateActivation(o); err != nil {
		return err
	} else if separate {
		return d.compose(s, o)
	}
	if o.quantises() || d.widens(o) {
		return d.queueRows(s, o)
	}
	if o.Narrow() {
		return d.queueNarrow(s, o)
	}
	of := o.format()
	launch, err := d.choose(o)
	switch {
	case err != nil:
		return err
	case launch.skinny != nil:
		return d.queueSkinny(s, o, *launch.skinny, fusedAppend{})
	case launch.gemm != nil:
		return d.queueGEMM(s, o, launch.gemm, fusedAppend{})
	}
	x, norm := o.X, o.Norm
	before, err := d.normsBefore(o)
	if err != nil {
		return err
	}
	if before {
		if err := o.Scratch.CheckFloats("linear", "the scratch", o.Rows*o.In); err != nil {
			return err
		}
		if err := d.Norm(s, o.Rows, o.In, x, o.Scratch, norm); err != nil {
			return err
		}
		x, norm = o.Scratch, nil
	}
	kernel, err := d.gemvOf(o)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	tiles := o.tilesOf(gemvTile)
	for row := 0; row < o.Rows; {
		l, ok, err := d.configureGEMV(kernel, of, o.Rows-row, o.In, tiles, norm != nil)
		if err != nil {
			return err
		}
		if !ok {
			return gpu.Errorf("linear", attn.ErrShape, "rows of %d elements: the GPU has too little shared memory", o.In)
		}
		p := linearParams{x: x.Address() + uint64(row)*uint64(o.In)*4, rows: int32(l.rows), split: int32(l.split), stages: int32(l.stages)}
		if err := d.linearArgs(&p, o, norm, row, gemvTile, false); err != nil {
			return err
		}
		cuda.Struct(&d.args, &p)
		d.hold(x)
		if err := kernel.Launch(s, clusterGrid(l.clusters, l.split, gemvWarps*32, l.shared, d.overlap()), &d.args); err != nil {
			return err
		}
		row += l.rows
	}
	return nil
}

// linearArgs appends the arguments of a launch with the parts of partArgs, beyond those that p has already. The
// launch holds all memory but x.
func (d *Engine) linearArgs(p *linearParams, o *Linear, norm *Norm, row, tile int, pairs bool) error {
	parts, err := d.partArgs(o, row, tile, tile, pairs)
	if err != nil {
		return err
	}
	p.maps, p.b, p.y, p.out, p.tiles, p.in = parts.maps, parts.b, parts.y, parts.out, parts.tiles, int32(o.In)
	for i := range o.Parts {
		p.w[i] = o.Parts[i].W.Address()
	}
	if o.Residual.Buffer != nil {
		p.residual = o.Residual.Address() + uint64(row)*uint64(o.Parts[0].Out)*4
	}
	d.args.Reset()
	if norm != nil {
		p.norm, p.eps, p.offset = norm.kind(), float32(norm.Eps), norm.offset()
		p.gamma, p.beta = norm.Gamma.AddressOr0(), norm.Beta.AddressOr0()
		d.hold(norm.Gamma, norm.Beta)
	}
	p.activation = o.activation()
	if o.Early {
		p.early = 1
	}
	d.hold(o.Residual)
	d.holdParts(o)
	return nil
}

// holdParts is hold for the layers' memory.
func (d *Engine) holdParts(o *Linear) {
	for i := range o.Parts {
		d.hold(o.Parts[i].W, o.Parts[i].B, o.Parts[i].Y)
	}
}

// linearMap is the key of a tensor map.
type linearMap struct {
	address      uint64
	in, out, box int
	element      attn.DType
	pairs        bool
	parts        int // parts of the operands of x; 0: weights
	deep         int // parts of a box
	padded       int // rows of the operands of x, also behind the last row of x
}

// tensorMap returns the map of weights, with boxes of 128 bytes of the given rows; an empty map if the copy engine
// can't have one.
func (d *Engine) tensorMap(w *gpu.Memory, in, out, box int) (t cuda.TensorMap, err error) {
	if !d.overlap() {
		return t, nil
	}
	key := linearMap{address: w.Address(), in: in, out: out, box: box, element: w.DType}
	return d.maps.Get(key, func() (cuda.TensorMap, error) {
		size := uint64(w.DType.Size())
		row := uint64(in) * size
		return d.dev.TensorMap(w.Buffer, w.Offset, cuda.Tiles{
			ElementBytes: int(size), Dims: [3]uint64{uint64(in), uint64(out), 1}, Strides: [2]uint64{row, row * uint64(out)},
			Box: [3]uint32{uint32(128 / size), uint32(box), 1},
		})
	})
}

// pairMap returns the map of weights in rows of whole column blocks of 128 bytes, with boxes of two column blocks of
// the given rows.
func (d *Engine) pairMap(w *gpu.Memory, in, out, box int) (cuda.TensorMap, error) {
	return d.maps.Get(linearMap{address: w.Address(), in: in, out: out, box: box, element: w.DType, pairs: true}, func() (cuda.TensorMap, error) {
		size := w.DType.Size()
		return d.dev.TensorMap(w.Buffer, w.Offset, cuda.Tiles{
			ElementBytes: size, Dims: [3]uint64{uint64(128 / size), uint64(out), uint64(in * size / 128)}, Strides: [2]uint64{uint64(in * size), 128},
			Box: [3]uint32{uint32(128 / size), uint32(box), 2},
		})
	})
}
