package layers

import (
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// This file has a Loss with products of rounded operands. W is rounded once. The gradient of X needs the transpose of W, which is rounded,
// too. A row of logits is an operand of the gradients, so its length is the vocabulary's, rounded up to a multiple of 8. The last logits
// of a row are zeros.

// mostRoundedLogits is mostLogits with products of rounded operands. A transpose of the logits takes as much memory as the logits.
const mostRoundedLogits = mostLogits / 2

// rounds reports whether o has products of rounded numbers.
func (o *Loss) rounds() bool { return o.Products != 0 && canRound(o.Products, o.Width) }

// wide returns the number of elements from a row of logits to the next.
func (o *Loss) wide() int {
	if o.rounds() {
		return attn.Ceil(o.Vocabulary, 8) * 8
	}
	return o.Vocabulary
}

// aligned reports whether the GEMMs can read and write the operands where they are.
func (o *Loss) aligned() bool {
	at := o.X.Address() | o.W.Address()
	if o.DY.Buffer != nil {
		at |= o.DX.Address() | o.DW.Address()
	}
	return at%16 == 0
}

// roundedLoss is the layers of a piece of a Loss, and the scratch memory of all pieces.
type roundedLoss struct {
	w, turned, logits, across gpu.Memory // W; its transpose; logits; their transpose
	forward, toX, toW         Linear
	scratch                   int
}

// roundedLossOf returns the layers for the first piece of o.
func (d *Engine) roundedLossOf(o *Loss) (r roundedLoss, err error) {
	piece, wide := d.piece(o), o.wide()
	deep := attn.Ceil(piece, 8) * 8
	memory := scratch{of: o.Scratch}
	r.w, r.logits = memory.takeOf(attn.Product(wide, o.Width), o.Products), memory.take(attn.Product(piece, wide))
	r.turned, r.across = memory.takeOf(attn.Product(o.Width, wide), o.Products), memory.take(attn.Product(o.Vocabulary, deep))
	x := memory.takeOf(attn.Product(o.Width, deep), o.Products) // the transpose of a piece of X
	r.forward = Linear{Rows: piece, In: o.Width, RoundX: true, Parts: []LinearPart{{Out: wide, W: r.w, Y: r.logits}}}
	r.toX = Linear{Rows: piece, In: wide, X: r.logits, RoundX: true, Parts: []LinearPart{{Out: o.Width, W: r.turned}}}
	r.toW = Linear{Rows: o.Vocabulary, In: deep, X: r.across, RoundX: true, Parts: []LinearPart{{Out: o.Width, W: x}}}
	most := 0
	for _, l := range []*Linear{&r.forward, &r.toX, &r.toW} {
		n, err := d.Scratch(l)
		if err != nil {
			return r, err
		}
		most = max(most, n)
	}
	rest := memory.take(most)
	r.forward.Scratch, r.toX.Scratch, r.toW.Scratch, r.scratch = rest, rest, rest, memory.used
	return r, nil
}

// roundedLoss queues a checked Loss that rounds.
func (d *Engine) roundedLoss(s *cuda.Stream, o *Loss) error {
	if d.multipliesLoss(o) {
		return d.productsOfLoss(s, o)
	}
	r, err := d.roundedLossOf(o)
	if err != nil {
		return err
	}
	// The rows of W behind the vocabulary are zeros, which makes the last logits of a row zeros.
	if err := s.Set(r.w.Buffer, r.w.Offset, 0, int64(2*r.w.Len)); err != nil {
		return err
	}
	if err := d.Convert(s, &Convert{N: attn.Product(o.Vocabulary, o.Width), X: o.W, Y: r.w}); err != nil {
		return err
	}
	gradients := o.DY.Buffer != nil
	if gradients {
		if err := d.transpose(s, o.Vocabulary, o.Width, o.Width, o.wide(), o.W, r.turned); err != nil {
			return err
		}
	}
	piece := r.forward.Rows
	for from := 0; from < o.Rows; from += piece {
		rows := min(piece, o.Rows-from)
		x := elementsFrom(o.X, from*o.Width, rows*o.Width)
		r.forward.Rows, r.forward.X = rows, x
		if err := d.Linear(s, &r.forward); err != nil {
			return err
		}
		if err := d.lossOfRows(s, o, from, rows, r.logits, gpu.Memory{}); err != nil {
			return err
		}
		if !gradients {
			continue
		}
		r.toX.Rows, r.toX.Parts[0].Y = rows, elementsFrom(o.DX, from*o.Width, rows*o.Width)
		if err := d.Linear(s, &r.toX); err != nil {
			return err
		}
		deep := attn.Ceil(rows, 8) * 8
		if err := d.transpose(s, rows, o.Vocabulary, o.wide(), deep, r.logits, r.across); err != nil {
			return err
		}
		if err := d.transpose(s, rows, o.Width, o.Width, deep, x, r.toW.Parts[0].W); err != nil {
			return err
		}
		r.toW.In, r.toW.Parts[0].Y = deep, o.DW
		if from > 0 {
			r.toW.Residual = o.DW
		}
		if err := d.Linear(s, &r.toW); err != nil {
			return err
		}
		if err := d.lossBias(s, o, from, rows, r.logits); err != nil {
			return err
		}
	}
	return nil
}

// mostLogitsOfProducts is mostRoundedLogits for kernels of hopper.go, which need logits in 16 bits and no transposes.
const mostLogitsOfProducts = mostLogits / 5 * 4

// multipliesLoss reports whether o has products of hopper.go.
func (d *Engine) multipliesLoss(o *Loss) bool {
	return o.rounds() && o.Products == attn.BFloat16 && d.hopperFor(o.Products, o.Rows, hopperLayout{})
}

// lossProducts is the scratch memory of the pieces of a Loss for which multipliesLoss holds.
type lossProducts struct {
	x, w, logits, grads gpu.Memory // x and w in 16 bits; logits, and their gradient in 16 bits
	slices              gpu.Memory // as hopperProduct.scratch
	scratch             int
}

// products returns the products of `rows` rows of o, from row `from` on: logits, and the gradients of x and w.
func (r *lossProducts) products(o *Loss, from, rows int) (forward, toX, toW hopperProduct) {
	wide := o.wide()
	forward = hopperProduct{m: rows, k: o.Width, wide: o.Width, a: r.x, parts: []LinearPart{{Out: wide, W: r.w, Y: r.logits}}}
	toX = hopperProduct{m: rows, k: wide, wide: wide, layout: hopperLayout{b: true}, a: r.grads, parts: []LinearPart{{Out: o.Width, W: r.w}}}
	toW = hopperProduct{m: o.Vocabulary, k: rows, wide: wide, layout: hopperLayout{a: true, b: true}, a: r.grads, parts: []LinearPart{{Out: o.Width, W: r.x, Y: o.DW}}}
	toX.parts[0].Y = elementsFrom(o.DX, from*o.Width, rows*o.Width)
	if from > 0 {
		toW.plus = o.DW
	}
	return forward, toX, toW
}

func (d *Engine) lossProductsOf(o *Loss) (r lossProducts, err error) {
	piece, wide, memory := d.piece(o), o.wide(), scratch{of: o.Scratch}
	r.w, r.logits = memory.takeOf(attn.Product(wide, o.Width), o.Products), memory.take(attn.Product(piece, wide))
	r.x, r.grads = memory.takeOf(attn.Product(piece, o.Width), o.Products), memory.takeOf(attn.Product(piece, wide), o.Products)
	most := 0
	for _, rows := range []int{piece, o.Rows % piece} {
		if rows == 0 {
			continue
		}
		forward, toX, toW := r.products(o, 0, rows)
		for _, p := range []*hopperProduct{&forward, &toX, &toW} {
			l, err := d.hopperLaunchOf(o.Products, p.layout, p.m, p.k, p.parts)
			if err != nil {
				return r, err
			}
			most = max(most, p.slicesScratch(&l))
		}
	}
	r.slices = memory.take(most)
	r.scratch = memory.used
	return r, nil
}

// productsOfLoss queues a checked Loss for which multipliesLoss holds.
func (d *Engine) productsOfLoss(s *cuda.Stream, o *Loss) error {
	r, err := d.lossProductsOf(o)
	if err != nil {
		return err
	}
	// The rows of W behind the vocabulary are zeros, which makes the last logits of a row zeros.
	if n := attn.Product(o.Vocabulary, o.Width); n < r.w.Len {
		if err := s.Set(r.w.Buffer, r.w.Offset+2*int64(n), 0, 2*int64(r.w.Len-n)); err != nil {
			return err
		}
	}
	if err := d.roundTo(s, o.Products, Convert{N: attn.Product(o.Vocabulary, o.Width), X: o.W, Y: r.w}); err != nil {
		return err
	}
	product := func(p *hopperProduct, round ...Convert) error {
		l, err := d.hopperLaunchOf(o.Products, p.layout, p.m, p.k, p.parts)
		if err != nil {
			return err
		}
		p.scratch = r.slices
		if err := d.roundTo(s, o.Products, round...); err != nil {
			return err
		}
		return d.queueHopper(s, p, &l)
	}
	piece := d.piece(o)
	for from := 0; from < o.Rows; from += piece {
		rows := min(piece, o.Rows-from)
		forward, toX, toW := r.products(o, from, rows)
		if err := product(&forward, Convert{N: rows * o.Width, X: elementsFrom(o.X, from*o.Width, rows*o.Width), Y: r.x}); err != nil {
			return err
		}
		rounded := r.grads
		if o.B.Buffer != nil { // the gradient of B is a sum of float32
			rounded = gpu.Memory{}
		}
		if err := d.lossOfRows(s, o, from, rows, r.logits, rounded); err != nil {
			return err
		}
		if o.DY.Buffer == nil {
			continue
		}
		var round []Convert
		if rounded.Buffer == nil {
			round = []Convert{{N: rows * o.wide(), X: r.logits, Y: r.grads}}
		}
		if err := product(&toX, round...); err != nil {
			return err
		}
		if err := product(&toW); err != nil {
			return err
		}
		if err := d.lossBias(s, o, from, rows, r.logits); err != nil {
			return err
		}
	}
	return nil
}
