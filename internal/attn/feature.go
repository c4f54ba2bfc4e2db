package attn

import (
	"fmt"
	"slices"

	"gorgonia.org/leanattention/internal/lean"
)

// Feature is something that a problem asks for and that an engine may not be able to do. Features are bits.
type Feature uint32

const (
	Causal Feature = 1 << iota
	Window
	SinkTokens
	Trees         // of the new tokens of sequences
	Rotates       // queries and new keys are turned by a rotary embedding
	OtherValueDim // values are of another width than keys
	SeveralPlanes // a key is the rows of several planes
	ValuesInKeys  // values are parts of keys
	SeveralTypes  // planes are of different types
	Scaled        // elements of pages have scales
	OtherPolicy   // LeanTiles are not cut by stream-K
	SetTiles      // the caller says how large LeanTiles are
	SetWorkers    // the caller says how many workers there are
	Unfused
	BatchInvariance
	unknown // a field of Mask or Score that Features knows nothing of

	firstOfScore // of the features of a Score
)

// Features returns what p asks for.
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
	f |= rest.Score.take()
	note(rest.Mask != Mask{} || rest.Score != Score{}, unknown)
	note(p.ValueDim != p.Dim, OtherValueDim)
	f |= p.Pages.features()
	note(p.Policy != lean.Policy{}, OtherPolicy)
	note(p.TileTokens != 0, SetTiles)
	note(p.Workers != 0, SetWorkers)
	note(p.Unfused, Unfused)
	note(p.Invariant, BatchInvariance)
	return f
}

// taken makes *x the zero value, and reports whether it was another.
func taken[T comparable](x *T) bool {
	var zero T
	was := *x
	*x = zero
	return was != zero
}

// text tells the first of some features that p asks for.
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
	}
	if f >= firstOfScore {
		return p.Score.text(f & -f)
	}
	return "a mask or a change of scores that it knows nothing of"
}

// Can is what one way into an engine can do. It lists what is there: what nobody has listed is refused.
type Can struct {
	Name     string // of the way, for errors
	Features Feature
	KV       []DType
}

// Does says whether c can do all of p.
func (c *Can) Does(p *Problem) bool {
	return p.Features()&^c.Features == 0 && c.otherType(p) < 0
}

// Do reports the first thing of p that c can't do. Errors wrap ErrUnsupported, or ErrDType for the type of keys and
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

// otherType returns the first plane whose type c does not list, -1 where there is none.
func (c *Can) otherType(p *Problem) int {
	return slices.IndexFunc(p.Pages.planes(), func(plane Plane) bool { return !slices.Contains(c.KV, plane.DType) })
}
