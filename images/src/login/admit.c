/* Admits a user, called by PAM (pam_exec) after sshd has accepted the key: only if the home answers, and in the
 * user's share of this machine, if there are shares. A hung file server would keep the session in the kernel for
 * ever, without a message. One program for both, since starting one costs sshd more than either task. */
#define _GNU_SOURCE
#include "home.h"
#include "share.h"

int main(void) {
    const char *user = getenv("PAM_USER");
    if (!user) {
        fputs("usage: PAM_USER=NAME admit, from pam_exec\n", stderr);
        return 2;
    }
    /* Other modules refuse an unknown user. */
    const struct passwd *person = getpwnam(user);
    if (!person)
        return 0;
    uid_t number = person->pw_uid;
    if (home_answers(user, person->pw_dir)) {
        take_share(number, getppid());
        return 0;
    }
    printf("Your home %s does not answer: its file server is slow or away. Jobs go on running; please try again later.\n",
           person->pw_dir);
    return 1;
}
