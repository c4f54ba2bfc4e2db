package cpu

import (
	"encoding/binary"
	"math"
	"math/bits"
	"runtime"

	"gorgonia.org/leanattention/internal/lean"
)

// Strides places the rows of queries, outputs or log-sum-exps, in elements:
//
//	offset(row, head) = row*Row + head*Head
type Strides struct{ Row, Head int }

// PageStrides places the rows of keys or values, in elements:
//
//	offset(page, head, slot) = page*Page + head*Head + slot*Row
type PageStrides struct{ Page, Head, Row int }

// Geometry is what is the same for every sequence and every layer.
//
// A dense tensor is the case of one page a sequence, with PageTokens the capacity.
type Geometry struct {
	Heads, KVHeads int // query heads, a multiple of the KV heads; head h reads KV head h/(Heads/KVHeads)
	Dim, ValueDim  int // elements of a query or key row, and of a value or output row
	Query          Strides
	Out            Strides
	LSE            Strides
	Key, Value     PageStrides
	PageTokens     int
	Scale          float64     // on q.k, natural
	SoftCap        float64     // if not 0, scores s become SoftCap*tanh(s/SoftCap)
	Slopes         Slopes      // if not empty, the score of query head h with key j gets Slopes.Of(h)*(j-p), p being the query's position
	Bias           Bias        // if not zero, that of Operands is added to the scores, after all else
	Causal         bool        // position p = Keys-Queries+i, of query i of a sequence, sees keys j <= p, else all
	Window         int         // if not 0, only those with j > p-Window
	TileTokens     int         // tokens of a LeanTile; 0: DefaultTileTokens
	Policy         lean.Policy // how LeanTiles are handed to workers
	Unfused        bool        // scores, their softmax and the sum of values one behind the other: on GPUs only
	Workers        int         // logical workers; 0: runtime.GOMAXPROCS(0)
}

// Sequence is one sequence's part of a step: query position i is row Row+i of the queries and outputs,
// and key j lies in page Pages[j/PageTokens], slot j%PageTokens. Entries of Pages beyond the last key
// are not looked at. Rows of different sequences do not overlap.
type Sequence struct {
	Row, Queries, Keys int
	Pages              []int32
}

// Slopes are numbers, one for each query head, in a form that == compares: a Geometry is looked up by it.
type Slopes string

// NewSlopes returns x as Slopes.
func NewSlopes(x []float64) Slopes {
	b := make([]byte, 0, 8*len(x))
	for _, f := range x {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(f))
	}
	return Slopes(b)
}

// Len returns how many there are.
func (s Slopes) Len() int { return len(s) / 8 }

// Of returns the slope of a query head.
func (s Slopes) Of(head int) float64 {
	var bits uint64
	for i := range 8 {
		bits |= uint64(s[8*head+i]) << (8 * i)
	}
	return math.Float64frombits(bits)
}

// check reports slopes that are not finite, or not one for each head, if there are any.
func (s Slopes) check(op string, heads int) error {
	if s == "" {
		return nil
	}
	if len(s) != 8*heads {
		return errorf(op, ErrShape, "%d slopes for %d query heads", s.Len(), heads)
	}
	for h := range heads {
		if x := s.Of(h); math.IsNaN(x) || math.IsInf(x, 0) {
			return errorf(op, ErrShape, "the slope of head %d is %v", h, x)
		}
	}
	return nil
}

// firstSeen returns the first key that a window lets position p see. The window may be larger than any context.
func firstSeen(p, window int) int {
	if window == 0 || window > p {
		return 0
	}
	return p - window + 1
}

// badCap reports whether x is no soft cap.
func badCap(x float64) bool { return !(x >= 0) || math.IsInf(x, 0) }

// DefaultTileTokens is the number of tokens of a LeanTile unless a Geometry says otherwise: tiles of
// 128 to 512 tokens measured alike, less costs re-scaling, more makes loads uneven. It does not depend
// on the shape, so that a plan, and with it every rounding, follows from the geometry alone.
const DefaultTileTokens = 256

// withDefaults returns g with its zero values replaced by what they stand for.
func (g Geometry) withDefaults() Geometry {
	if g.TileTokens == 0 {
		g.TileTokens = DefaultTileTokens
	}
	if g.Workers == 0 {
		g.Workers = runtime.GOMAXPROCS(0)
	}
	return g
}

// check reports what is wrong with g itself.
func (g *Geometry) check(op string) error {
	switch {
	case g.KVHeads < 1 || g.Heads < 1 || g.Heads%g.KVHeads != 0:
		return errorf(op, ErrShape, "%d query heads for %d KV heads", g.Heads, g.KVHeads)
	case g.Dim < 1 || g.ValueDim < 1:
		return errorf(op, ErrShape, "head dim %d, value dim %d", g.Dim, g.ValueDim)
	case g.PageTokens < 1:
		return errorf(op, ErrShape, "pages of %d tokens", g.PageTokens)
	case g.TileTokens < 0:
		return errorf(op, ErrShape, "LeanTiles of %d tokens", g.TileTokens)
	case g.Workers < 0:
		return errorf(op, ErrShape, "%d workers", g.Workers)
	case math.IsNaN(g.Scale) || math.IsInf(g.Scale, 0):
		return errorf(op, ErrShape, "scale %v", g.Scale)
	case badCap(g.SoftCap):
		return errorf(op, ErrShape, "a soft cap of %v", g.SoftCap)
	case g.Window < 0:
		return errorf(op, ErrShape, "a window of %d keys", g.Window)
	case g.Policy.Kind > lean.PerHead:
		return errorf(op, ErrShape, "schedule %d", g.Policy.Kind)
	case g.Policy.Kind == lean.FixedSplit && g.Policy.Splits < 1:
		return errorf(op, ErrShape, "a fixed split into %d", g.Policy.Splits)
	case g.Unfused:
		return errorf(op, ErrShape, "unfused attention: it is there for GPUs only")
	}
	if err := g.Slopes.check(op, g.Heads); err != nil {
		return err
	}
	if err := g.Bias.check(op, g.Heads); err != nil {
		return err
	}
	for _, s := range []struct {
		name string
		Strides
	}{{"query", g.Query}, {"output", g.Out}, {"log-sum-exp", g.LSE}} {
		if s.Row < 0 || s.Head < 0 {
			return errorf(op, ErrShape, "%s strides %+v", s.name, s.Strides)
		}
	}
	if err := g.Key.check(op, "key"); err != nil {
		return err
	}
	return g.Value.check(op, "value")
}

func (s PageStrides) check(op, name string) error {
	if s.Page < 0 || s.Head < 0 || s.Row < 0 {
		return errorf(op, ErrShape, "%s strides %+v", name, s)
	}
	return nil
}

// extent returns the number of elements that rows [0, rows) of the given heads and width reach over,
// and MaxInt if that is no int.
func (s Strides) extent(rows, heads, dim int) int {
	if rows == 0 {
		return 0
	}
	return sumProducts(dim, rows-1, s.Row, heads-1, s.Head, 0, 0)
}

// extent returns the number of elements that pages [0, pages) of the given heads, slots and width
// reach over, and MaxInt if that is no int.
func (s PageStrides) extent(pages, heads, slots, dim int) int {
	if pages == 0 {
		return 0
	}
	return sumProducts(dim, pages-1, s.Page, heads-1, s.Head, slots-1, s.Row)
}

// sumProducts returns n + a*b + c*d + e*f for arguments >= 0, and MaxInt if that does not fit.
func sumProducts(n, a, b, c, d, e, f int) int {
	sum := uint64(n)
	for _, p := range [3][2]int{{a, b}, {c, d}, {e, f}} {
		hi, lo := bits.Mul64(uint64(p[0]), uint64(p[1]))
		var carry uint64
		sum, carry = bits.Add64(sum, lo, 0)
		if hi != 0 || carry != 0 || sum > math.MaxInt {
			return math.MaxInt
		}
	}
	return int(sum)
}
