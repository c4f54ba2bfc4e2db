package measure

import (
	"flag"
	"fmt"
	"strconv"
	"strings"
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

// Fields are what is between commas; an empty text has none.
func Fields(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
}

// Counts reads the positive numbers of a flag, with commas between; an empty text has none.
func Counts(name, text string) (all []int, err error) {
	for _, s := range Fields(text) {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return nil, fmt.Errorf("-%s: %q is not a positive number", name, s)
		}
		all = append(all, n)
	}
	return all, nil
}

// Only is b in some cases, and no bar in all others.
func Only(when bool, b *Bar) *Bar {
	if !when {
		return nil
	}
	return b
}
