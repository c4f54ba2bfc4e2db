package attn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/lean"
)

// Feature is a property of a problem that an engine may not support. Features are bits.
type Feature uint32

const (
	Causal Feature = 1 << iota
	Window
	SinkTokens
	Trees         // of the new tokens of sequences
	Rotates       // a rotary embedding of queries and new keys
	RotatesBehind // a rotary embedding that leaves first elements of heads as they are
	OtherValueDim // values are of another width than keys
	SeveralPlanes // a key is the rows of several planes
	ValuesInKeys  // values are parts of keys
	SeveralTypes  // planes are of different types
	Scaled        // elements of pages have scales
	MixedKeys     // keys are mixed, and queries must be
	OtherPolicy   // a schedule other than stream-K
	SetTiles      // the caller sets the size of LeanTiles
	SetWorkers    // the caller sets the number of workers
	Unfused
	BatchInvariance
	Measures // entropies or attention mass
	unknown  // a field of Mask or Score that Features does not know

	firstOfScore // of the features of a Score
)

// Features returns the features of p.
func (p *Problem) Features() (f Feature) {
	rest := *p
	note := func(there bool, feature Feature) {
		if there {
			f |= feature
		}
	}
	note(taken(&rest.Causal), Causal)
	note(taken(&rest.Window), Window)
	note(taken(&rest.SinkTokens), SinkTokens)
	note(taken(&rest.Tree), Trees)
	note(p.Rotary != Rotary{}, Rotates)
	note(p.Rotary.First != 0, RotatesBehind)
	f |= rest.Score.take()
	note(rest.Mask != Mask{} || rest.Score != Score{}, unknown)
	note(p.ValueDim != p.Dim, OtherValueDim)
	f |= p.Pages.features()
	note(p.Policy != lean.Policy{}, OtherPolicy)
	note(p.TileTokens != 0, SetTiles)
	note(p.Workers != 0, SetWorkers)
	note(p.Unfused, Unfused)
	note(p.Invariant, BatchInvariance)
	note(p.Measures, Measures)
	return f
}

// taken sets *x to the zero value, and reports whether *x was another value.
func taken[T comparable](x *T) bool {
	var zero T
	was := *x
	*x = zero
	return was != zero
}

// text describes the first of the features f of p.
func (f Feature) text(p *Problem) string {
	switch f & -f {
	case Causal:
		return "a causal mask"
	case Window:
		return fmt.Sprintf("a window of %d keys", p.Window)
	case SinkTokens:
		return fmt.Sprintf("%d sink tokens", p.SinkTokens)
	case Trees:
		return "a tree of new tokens"
	case Rotates:
		return fmt.Sprintf("a rotary embedding of %d elements of a head", 2*p.Rotary.Turns.Len())
	case RotatesBehind:
		return fmt.Sprintf("a rotary embedding of the elements from %d on", p.Rotary.First)
	case OtherValueDim:
		return fmt.Sprintf("values of %d elements and keys of %d", p.ValueDim, p.Dim)
	case SeveralPlanes:
		return fmt.Sprintf("keys of %d planes", p.Pages.KeyPlanes)
	case ValuesInKeys:
		return "values that are parts of their keys"
	case SeveralTypes:
		return "keys and values of different types"
	case Scaled:
		for _, plane := range p.Pages.planes() {
			if plane.Scales != NoScales {
				return fmt.Sprintf("%v with %v", plane.DType, plane.Scales)
			}
		}
		return "keys and values with scales"
	case MixedKeys:
		return fmt.Sprintf("mixed keys of %v", p.Pages.Key().DType)
	case OtherPolicy:
		return fmt.Sprintf("the schedule %v", p.Policy.Kind)
	case SetTiles:
		return fmt.Sprintf("LeanTiles of %d tokens", p.TileTokens)
	case SetWorkers:
		return fmt.Sprintf("%d workers", p.Workers)
	case Unfused:
		return "unfused attention"
	case BatchInvariance:
		return "batch invariance"
	case Measures:
		return "entropies or attention mass"
	}
	if f >= firstOfScore {
		return p.Score.text(f & -f)
	}
	return "a mask or a change of scores that it knows nothing of"
}

// Can lists the features and types that one entry of an engine supports. Any other feature or type is an error.
type Can struct {
	Name     string // of the entry, for errors
	Features Feature
	KV       []DType
}

// Does reports whether c supports p.
func (c *Can) Does(p *Problem) bool {
	return p.Features()&^c.Features == 0 && c.otherType(p) < 0
}

// Do returns an error that names the first part of p that c does not support. Errors wrap ErrUnsupported, or ErrDType for the type of keys and
// values.
func (c *Can) Do(op string, p *Problem) error {
	if more := p.Features() &^ c.Features; more != 0 {
		return Errorf(op, ErrUnsupported, "%s: %s", c.Name, more.text(p))
	}
	if i := c.otherType(p); i >= 0 {
		return Errorf(op, ErrDType, "%s: keys and values are %v; it takes %v", c.Name, p.Pages.Planes[i].DType, c.KV)
	}
	return nil
}

// otherType returns the first plane whose type c does not list; -1 if there is none.
func (c *Can) otherType(p *Problem) int {
	return slices.IndexFunc(p.Pages.planes(), func(plane Plane) bool { return !slices.Contains(c.KV, plane.DType) })
}
