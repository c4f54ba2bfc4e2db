package measure

import (
	"flag"
	"time"
)

// Options are the flags of every command that measures.
type Options struct {
	JSON    string
	Quick   bool
	Workers int
}

func Flags(flags *flag.FlagSet) *Options {
	o := new(Options)
	flags.StringVar(&o.JSON, "json", "", "`file` to write every figure to, with its bar")
	flags.BoolVar(&o.Quick, "quick", false, "few and short turns: figures that are less certain")
	flags.IntVar(&o.Workers, "workers", 2, "`threads` that compute")
	return o
}

// Pace is that of steps which take micro- or milliseconds.
func (o *Options) Pace() Pace {
	if o.Quick {
		return Pace{Rounds: 3, Turn: 20 * time.Millisecond}
	}
	return Pace{Rounds: 11, Turn: 120 * time.Millisecond}
}

// Only is b in some cases, and no bar in all others.
func Only(when bool, b *Bar) *Bar {
	if !when {
		return nil
	}
	return b
}
