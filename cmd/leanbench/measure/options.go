package measure

import (
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Options are the flags that every measuring command has.
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

// Pace returns the pace for steps that take microseconds or milliseconds.
func (o *Options) Pace() Pace {
	if o.Quick {
		return Pace{Rounds: 3, Turn: 20 * time.Millisecond}
	}
	return Pace{Rounds: 11, Turn: 120 * time.Millisecond}
}

// Fields splits text at commas. An empty text has no fields.
func Fields(text string) []string {
	return strings.FieldsFunc(text, func(r rune) bool { return r == ',' })
}

// Counts parses the comma-separated positive numbers of a flag. An empty text has none.
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

// Only returns b if when is true, and otherwise nil, which is no bar.
func Only(when bool, b *Bar) *Bar {
	if !when {
		return nil
	}
	return b
}
