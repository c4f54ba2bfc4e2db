//go:build !linux

package files

import "errors"

func mkfifo(string) error { return errors.ErrUnsupported }
